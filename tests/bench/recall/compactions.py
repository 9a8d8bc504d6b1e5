"""Made-up compactions over recorded shapes: what exact prefix caching loses, and spans recover.

Recorded sessions say how long each prompt was, not what stood in it: their block ids name prefixes,
so text that moved cannot be seen. Here each prompt has as many tokens as recorded (a sixteenth of
them), and when a context is full, or became shorter in the recording, some of its messages are
dropped by chance. How many survive is stated; nothing of this was recorded.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from kvgraph.advisor.replay.recorded_sessions import RecordedTurn, Session, read_sessions
from kvgraph.hooks.recall.cover import SpliceLimits, cover
from kvgraph.hooks.recall.spans import UNFINDABLE, Domain, Piece, SpanIndex, Tokens

SCALE: Final = 16  # recorded tokens to one here
BLOCK: Final = 16  # tokens here: 256 recorded ones
FULL: Final = 100_000 // SCALE  # tokens of a context that is compacted; chosen: agents' own limits
SURVIVE: Final = 0.5  # of the messages between the head and the newest; chosen
CAPACITIES: Final = (1000, 2000, 4000)  # blocks of the pool, and as many copies
SESSIONS: Final = 24
GENERATIONS: Final = 4  # as many as are calibrated
_NEWEST: Final = 4  # messages that survive; chosen
_DOMAIN: Final = ("", "")


@dataclass
class Compacted:
    prompt: int = 0  # all of them
    exact: int = 0  # found by exact prefix
    lost: int = 0  # said before in their session, and not found so
    recovered: int = 0  # of those, covered by spans of copies
    compactions: int = 0  # prompts that lost messages


@dataclass
class _Context:
    name: str
    messages: list[Tokens] = field(default_factory=list)
    approximate: int | None = None
    generation: int = 0
    names: list[bytes] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(map(len, self.messages))


def play_compactions(
    folder: Path, blocks: int, seed: int, sessions: int = SESSIONS, generations: int = GENERATIONS
) -> Compacted:
    rng, done = np.random.default_rng(seed), Compacted()
    pool: OrderedDict[bytes, None] = OrderedDict()
    index = SpanIndex(BLOCK, blocks, rng)
    contexts: dict[str, _Context] = {}
    for session, turn in _by_time(read_sessions(folder)[:sessions]):
        context = contexts.setdefault(session.name, _Context(session.name))
        before = context.tokens
        done.compactions += _compact(context, turn, rng)
        kept = context.tokens
        _grow(context, session, turn, rng)
        tokens = np.concatenate(context.messages)
        hashes = _hashes(tokens)
        exact = _found(pool, hashes) * BLOCK
        before_it = hashes[exact // BLOCK - 1] if exact else b""
        limits, domains = SpliceLimits(), [_DOMAIN, *_own(context, generations)]
        pieces = cover(index, domains, tokens[:-1], exact, lambda _: True, limits, before_it)
        spliced = sum(piece.tokens for piece in pieces)
        said = min(kept, before)
        done.prompt += len(tokens)
        done.exact += exact
        done.lost += max(0, said - exact)
        done.recovered += min(spliced, max(0, said - exact))
        _keep(context, index, hashes, tokens, exact, pieces)
        _keep_own(context, index, tokens, (exact, exact + spliced), generations)
        _hold(pool, hashes, blocks)
    return done


def _by_time(sessions: Sequence[Session]) -> Iterator[tuple[Session, RecordedTurn]]:
    turns = [(session, turn) for session in sessions for turn in session.turns]
    return iter(sorted(turns, key=lambda each: each[1].at))


def _compact(context: _Context, turn: RecordedTurn, rng: np.random.Generator) -> bool:
    """Drop messages where the context is full, or was shorter in the recording."""
    wanted = turn.input_tokens // SCALE
    if (context.tokens <= FULL and wanted >= context.tokens) or len(context.messages) < 3 + _NEWEST:
        return False
    middle = context.messages[1:-_NEWEST]
    survivors = [each for each in middle if rng.random() < SURVIVE]
    context.messages = [context.messages[0], *survivors, *context.messages[-_NEWEST:]]
    return True


def _grow(
    context: _Context, session: Session, turn: RecordedTurn, rng: np.random.Generator
) -> None:
    """Add what is new: at first the head, then as much as was recorded, and a word at least."""
    if not context.messages:
        context.messages.append(_words(session.tool_tokens + session.system_tokens, rng))
    new = turn.input_tokens // SCALE - context.tokens
    context.messages.append(_words(max(new, 1 + turn.output_tokens // SCALE) * SCALE, rng))


def _words(recorded: int, rng: np.random.Generator) -> Tokens:
    return rng.integers(0, 1 << 40, max(1, recorded // SCALE), dtype=np.int64)


def _hashes(tokens: Tokens) -> list[bytes]:
    hashes, parent = list[bytes](), b""
    for at in range(0, len(tokens) // BLOCK * BLOCK, BLOCK):
        part = tokens[at : at + BLOCK].tobytes()
        parent = hashlib.blake2b(parent + part, digest_size=16).digest()
        hashes.append(parent)
    return hashes


def _found(pool: OrderedDict[bytes, None], hashes: Sequence[bytes]) -> int:
    for at, each in enumerate(hashes):
        if each not in pool:
            return at
    return len(hashes)


def _hold(pool: OrderedDict[bytes, None], hashes: Sequence[bytes], blocks: int) -> None:
    """LRU, tails first."""
    for each in reversed(hashes):
        pool.pop(each, None)
        pool[each] = None
    while len(pool) > blocks:
        pool.popitem(last=False)


def _own(context: _Context, generations: int) -> list[Domain]:
    return [(context.name, str(generation)) for generation in range(1, generations)]


def _keep(
    context: _Context, index: SpanIndex, hashes: list[bytes], tokens: Tokens, exact: int,
    pieces: Sequence[Piece],
) -> None:  # fmt: skip
    """Enter the blocks that were computed exactly; name the others after their session and turn."""
    if context.approximate is not None and exact <= context.approximate:
        context.approximate = None  # all behind it was computed, or is spliced anew
        context.generation = 0
    read = [segment.block_hash for piece in pieces for segment in piece.segments]
    if read:
        context.generation = max(context.generation, *(1 + _generation(index, at) for at in read))
    if pieces and context.approximate is None:
        context.approximate = exact
    known = len(hashes) if context.approximate is None else context.approximate // BLOCK
    kept = context.names[: exact // BLOCK]
    nonce = len(tokens).to_bytes(8, "big") + context.name.encode()
    new = [hashlib.blake2b(each + nonce, digest_size=16).digest() for each in hashes[len(kept) :]]
    context.names = [*hashes[:known], *[*kept, *new][known:]]
    index.add(_DOMAIN, hashes[:known], tokens)


def _keep_own(
    context: _Context, index: SpanIndex, tokens: Tokens, spliced: tuple[int, int], generations: int
) -> None:
    """Enter what was computed behind spliced text, for its session alone."""
    if context.approximate is None or context.generation >= generations:
        return
    mine, domain = tokens.copy(), (context.name, str(context.generation))
    mine[slice(*spliced)] = UNFINDABLE
    index.add(domain, context.names, mine, first=spliced[0] // BLOCK)


def _generation(index: SpanIndex, block_hash: bytes) -> int:
    domain = index.domain(block_hash)
    return int(domain[1]) if domain is not None and domain != _DOMAIN else 0
