"""A session's next turn on another engine, by way of a shared store: real CPU engines."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ..errors import BenchError
from ..figures import Figures, quantile
from ..serving.completions import Answer, open_client, plain_body, send
from ..serving.model import ModelShape, ensure_model
from ..serving.vllm_server import Server, ServerPlan
from ..serving.workload import BLOCK

CONTEXT: Final = 2048  # tokens of a session's first turn

POOL: Final = 12 * CONTEXT // BLOCK
"""Blocks of an engine's pool; chosen: more than the 512 victims that it copies ahead, so that older
blocks have no copy yet."""

PAUSE_S: Final = 1.0  # between a session's turns; chosen

SHAPE: Final = ModelShape()
_ANSWER: Final = 8  # tokens
_WARMING: Final = 2  # sessions that are not counted


@dataclass(slots=True)
class _Moves:
    """What came of sessions that changed engines: times to first token (s) of ``moved`` second
    turns there, and of ``computed`` prompts of the same length that nobody has; prompt tokens
    ``found`` of ``asked``; second turns whose answer is not the one that the first engine gives;
    and bytes in the store at the end.
    """

    moved: list[float] = field(default_factory=list)
    computed: list[float] = field(default_factory=list)
    found: int = 0
    asked: int = 0
    other_texts: int = 0
    stored: int = 0


def add_store(figures: Figures, sessions: int, say: Callable[[str], None]) -> None:
    """Measure a turn on another engine against computing its prompt, of so many sessions in each
    arm, and when to offload. Raises ServerError: an engine did not start; BenchError: an answer
    through the store differs from the one without.
    """
    with tempfile.TemporaryDirectory() as folder:
        at_turn, at_eviction = (
            _arm(Path(folder) / when, when, sessions, say) for when in ("turn", "eviction")
        )
    if at_turn.other_texts or at_eviction.other_texts:
        raise BenchError("an answer through the store is not the one without it")
    moved, computed = quantile(at_turn.moved, 50), quantile(at_turn.computed, 50)
    figures.add("pool_ttft_ratio", moved / computed, "", "≤ 0.3")
    figures.add("pool_ttft_ms", [1e3 * each for each in at_turn.moved], "ms")
    figures.add("pool_computed_ttft_ms", [1e3 * each for each in at_turn.computed], "ms")
    for when, arm in (("turn", at_turn), ("eviction", at_eviction)):
        figures.add(f"pool_found_at_{when}", arm.found / arm.asked, "")
        figures.add(f"pool_mib_at_{when}", arm.stored / 2**20, "MiB")


def _arm(folder: Path, when: str, sessions: int, say: Callable[[str], None]) -> _Moves:
    store, moves = folder / "store", _Moves()
    with _engine(folder, 1, when) as one, _engine(folder, 2, when) as two:
        asyncio.run(_play(one, two, sessions, moves))
        moves.stored = sum(file.stat().st_size for file in store.rglob("*.kv"))
    say(f"store, at {when}: {moves}")
    return moves


def _engine(folder: Path, number: int, when: str) -> Server:
    settings = {
        "AITHER_KVCACHE_WARM_GIB": "0.5",
        "AITHER_KVCACHE_STORE": str(folder / "store"),
        "AITHER_KVCACHE_STORE_GIB": "8",
        "AITHER_KVCACHE_STORE_AT": when,
        "OMP_NUM_THREADS": "1",
    }
    model = ensure_model(SHAPE, folder.parent / "model")
    plan = ServerPlan(
        str(model), True, folder, blocks=POOL, max_num_seqs=2, name=f"engine-{number}",
        settings=tuple(settings.items()),
    )  # fmt: skip
    return Server(plan)


async def _play(one: Server, two: Server, sessions: int, moves: _Moves) -> None:
    dice = random.Random(7)
    async with open_client(one.url) as first, open_client(two.url) as second:
        for number in range(-_WARMING, sessions):
            prompt, other = _prompt(dice), _prompt(dice)
            await send(first, f"first {number}", _body(f"s{number}", prompt))
            await asyncio.sleep(PAUSE_S)
            turn = [*prompt, *_prompt(dice)[:BLOCK]]
            moved = await send(second, f"moved {number}", _body(f"s{number}", turn))
            alone = await send(second, f"alone {number}", _body(f"o{number}", other))
            stayed = await send(first, f"stayed {number}", _body(f"s{number}", turn))
            if number >= 0:
                _note(moves, moved, alone, stayed)


def _note(moves: _Moves, moved: Answer, alone: Answer, stayed: Answer) -> None:
    moves.moved.append(moved.ttft_s)
    moves.computed.append(alone.ttft_s)
    moves.found += moved.cached_tokens
    moves.asked += moved.prompt_tokens
    moves.other_texts += moved.text != stayed.text


def _prompt(dice: random.Random) -> list[int]:
    return [dice.randrange(3, SHAPE.vocab) for _ in range(CONTEXT)]


def _body(session: str, prompt: list[int]) -> dict[str, Any]:
    return plain_body(session, prompt, _ANSWER)
