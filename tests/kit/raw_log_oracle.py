"""Why requests missed, told from an engine's raw log alone: a model of plain dictionaries.

Reads lines as ``page_attribution`` words events, ``at`` in seconds, knows all of the past and what
comes next, and imports nothing of ours: what the product says of a miss is compared with it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

Line = dict[str, Any]
Who = tuple[str | None, str | None]  # a session's name and its tenant's
Block = tuple[str, str]  # a model and a hash: of one model, hashes mean the same everywhere


@dataclass
class Verdict:
    """One request, as it was first scheduled: why (``reason``, in the product's words, behind a
    colon what tells apart its cases) it did not find block ``index``, when that ``left`` the pool
    (None: it did not), and who may be named beside it.
    """

    request: str
    engine: str
    index: int
    reason: str
    found: int
    loaded: int
    prefetched: int
    left: float | None = None
    cause: int | None = None
    others: frozenset[Who] = frozenset()
    holders: frozenset[str] = frozenset()


@dataclass
class _Engine:
    model: str = ""
    pool: set[Block] = field(default_factory=set)
    copies: dict[Block, set[int]] = field(default_factory=lambda: defaultdict(set))
    left: dict[Block, tuple[str, float]] = field(default_factory=dict)
    lost: dict[Block, int] = field(default_factory=dict)
    brought: set[Block] = field(default_factory=set)
    awaited: dict[str, set[Block]] = field(default_factory=dict)
    open: dict[str, tuple[Verdict, Block]] = field(default_factory=dict)


class RawLogOracle:
    """Is shown every line of a log in its order; ``verdicts`` are final once all were."""

    def __init__(self) -> None:
        self.verdicts: list[Verdict] = []
        self._engines: dict[str, _Engine] = defaultdict(_Engine)
        self._known: set[Block] = set()
        # After which block which others came, and which sessions walked them.
        self._after: dict[Block, dict[Block, set[Who]]] = defaultdict(lambda: defaultdict(set))
        self._turns: set[Who] = set()
        self._salts: dict[tuple[str, str], set[int]] = defaultdict(set)  # by model and content
        self._readers: dict[str, Callable[[str, _Engine, Line], None]] = {
            "EngineHello": self._greeted,
            "BlocksStored": self._stored,
            "BlocksRemoved": self._removed,
            "BlocksCleared": self._cleared,
            "BlocksResident": self._listed,
            "BlocksSpilled": self._spilled,
            "BlocksLoaded": self._brought_back,
            "CopiesDropped": self._dropped,
            "RequestStarted": self._started,
            "RequestFinished": self._finished,
        }

    def read(self, line: Line) -> None:
        """Take the next line; kinds that say nothing of blocks or requests are passed over."""
        if line["event"] in self._readers:
            name = line["engine"]
            self._readers[line["event"]](name, self._engines[name], line)

    # Blocks -------------------------------------------------------------------------------------

    def _greeted(self, name: str, engine: _Engine, line: Line) -> None:
        if line["model"] != engine.model:
            self._engines[name] = _Engine(model=line["model"])

    def _stored(self, name: str, engine: _Engine, line: Line) -> None:
        blocks = _blocks(engine, line)
        parent = line["parent"]
        before = [] if parent is None else [(engine.model, f"{parent:#018x}")]
        who: set[Who] = {(line["session"], None)} if line["session"] else set()
        self._walk([*before, *blocks], who)
        engine.pool |= set(blocks)

    def _removed(self, name: str, engine: _Engine, line: Line) -> None:
        for block in _blocks(engine, line):
            if block in engine.pool:
                engine.pool.discard(block)
                self._leave(engine, block, "evicted", line["at"])
                engine.lost.pop(block, None)
                for awaited in engine.awaited.values():
                    awaited.discard(block)  # preempted: whoever computed it lost it
        for verdict, block in list(engine.open.values()):
            if block not in engine.pool:  # it had left before the request looked
                del engine.open[verdict.request]
                self._say_gone(verdict, engine, block)

    def _cleared(self, name: str, engine: _Engine, line: Line) -> None:
        for block in engine.pool:
            self._leave(engine, block, "reset", line["at"])
        engine.pool.clear()

    def _listed(self, name: str, engine: _Engine, line: Line) -> None:
        listed = set(_blocks(engine, line))
        for block in engine.pool - listed:
            self._leave(engine, block, "unheard", line["at"])
        engine.pool = listed
        self._known |= listed
        engine.copies.clear()  # told again, right after
        engine.awaited.clear()  # ends may be among the lost news

    def _leave(self, engine: _Engine, block: Block, way: str, at: float) -> None:
        engine.left[block] = way, at
        engine.brought.discard(block)

    def _spilled(self, name: str, engine: _Engine, line: Line) -> None:
        for block in _blocks(engine, line):
            engine.copies[block].add(line["tier"])
            engine.lost.pop(block, None)
            self._known.add(block)

    def _brought_back(self, name: str, engine: _Engine, line: Line) -> None:
        engine.pool |= set(_blocks(engine, line))
        engine.brought |= set(_blocks(engine, line))

    def _dropped(self, name: str, engine: _Engine, line: Line) -> None:
        for block in _blocks(engine, line):
            engine.copies[block].discard(line["tier"])
            if not engine.copies[block]:
                del engine.copies[block]
                engine.lost[block] = line["cause"]

    # Requests -----------------------------------------------------------------------------------

    def _started(self, name: str, engine: _Engine, line: Line) -> None:
        blocks, size = _blocks(engine, line), line["block_size"]
        who: Who = (line["session"], line["tenant"])
        found, loaded = line["cached_tokens"] // size, line["loading_tokens"] // size
        brought = engine.brought & set(blocks[:found])
        engine.brought -= brought
        index = found + loaded
        verdict = Verdict(
            line["request_id"], name, index, "", found - len(brought), loaded, len(brought)
        )
        self.verdicts.append(verdict)
        engine.open.pop(verdict.request, None)
        if index >= min(len(blocks), (line["prompt_tokens"] - 1) // size):
            verdict.reason = "not_cacheable:partial"
        elif not line.get("reads_cache", True):
            verdict.reason = "not_cacheable:reads_none"
        elif line.get("lacking") is not None:  # the engine looked itself
            verdict.reason = "other_group"
        else:
            self._judge(verdict, engine, blocks, who)
            self._say_salted(verdict, engine, line)
        for content in line.get("contents", ()):
            self._salts[engine.model, content].add(line["salt"])
        engine.awaited[verdict.request] = set(blocks[index:])
        self._walk(blocks, {who})
        self._turns.add(who)

    def _finished(self, name: str, engine: _Engine, line: Line) -> None:
        self._walk(_blocks(engine, line), {(line["session"], line["tenant"])})
        engine.awaited.pop(line["request_id"], None)
        engine.open.pop(line["request_id"], None)

    def _judge(self, verdict: Verdict, engine: _Engine, blocks: list[Block], who: Who) -> None:
        block = blocks[verdict.index]
        if engine.copies.get(block):
            verdict.reason = "load_slower"
        elif block in engine.pool:
            verdict.reason = "unknown:in_pool"  # unless its eviction is told after the request
            engine.open[verdict.request] = verdict, block
        elif any(block in awaited for awaited in engine.awaited.values()):
            verdict.reason = "not_cacheable:under_way"
        elif block in engine.left:
            self._say_gone(verdict, engine, block)
        elif holders := self._holders(block):
            verdict.reason, verdict.holders = "other_engine", holders
        elif any(block in each.left for each in self._engines.values()):
            verdict.reason = "other_engine:had"
        elif block in self._known:
            verdict.reason = "unknown:uncomputed"
        else:
            self._say_new(verdict, blocks, who)

    def _say_gone(self, verdict: Verdict, engine: _Engine, block: Block) -> None:
        verdict.reason, verdict.left = engine.left[block]
        if verdict.reason == "unheard":
            verdict.reason, verdict.left = "unknown:unheard", None
        elif verdict.reason == "reset":
            verdict.left = None
        elif block in engine.lost:
            verdict.reason, verdict.cause = "copy_lost", engine.lost[block]

    def _say_new(self, verdict: Verdict, blocks: list[Block], who: Who) -> None:
        """Nobody asked for it before: whether others went on from the same place."""
        verdict.reason = "never_seen"
        if verdict.index == 0:
            if who in self._turns and who[0]:
                verdict.reason, verdict.others = "diverged", frozenset({who})
            return
        siblings = self._after.get(blocks[verdict.index - 1], {})
        walkers = {each for theirs in siblings.values() for each in theirs}
        if siblings:
            verdict.reason = "diverged"
            verdict.others = frozenset({who} if who[0] and who in walkers else walkers)

    def _say_salted(self, verdict: Verdict, engine: _Engine, line: Line) -> None:
        """Nobody asked for it under this salt: whether somebody did under another one."""
        if verdict.reason not in ("never_seen", "diverged") or not line.get("contents"):
            return
        salts = self._salts.get((engine.model, line["contents"][verdict.index]), set())
        if salts - {line["salt"]}:
            verdict.reason, verdict.others = "other_salt", frozenset()

    def _walk(self, blocks: list[Block], who: set[Who]) -> None:
        self._known |= set(blocks)
        for before, block in pairwise(blocks):
            self._after[before][block] |= who

    def _holders(self, block: Block) -> frozenset[str]:
        return frozenset(name for name, each in self._engines.items() if block in each.pool)


def _blocks(engine: _Engine, line: Line) -> list[Block]:
    return [(engine.model, each) for each in line["hashes"]]
