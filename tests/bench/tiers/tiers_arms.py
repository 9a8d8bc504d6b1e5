"""The arms of ``bench tiers``: what each server is started with, and what it did."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Final

import httpx
import numpy as np
from kvgraph.graph.types import SourceLayer
from kvgraph.hooks.tiers.ledger import TierCounts

from ..errors import ServerError
from ..serving.cache_ledger import own_counts
from ..serving.completions import PassResult, all_at_once, one_at_a_time
from ..serving.progress import DemoProgress
from ..serving.vllm_server import Server, ServerPlan
from ..serving.workload import BLOCK, Session, Span, Turn, Workload, Writer, system_prompts

EXPECTATION_ERROR: Final = 0.2  # A stated return is off by up to this share of the pause

CHAT_S: Final = 0.22
"""What a chat takes, served alone, on a machine for which the script's pauses are right."""

_KINDS: Final = 2


@dataclass(frozen=True, slots=True)
class TierScale:
    """How much of everything there is; lengths are tokens, times are seconds."""

    agents: int = 20
    turns: tuple[int, int] = (8, 9)
    agent_every_s: float = 0.6
    tool_pause_s: tuple[float, float] = (5.0, 12.0)
    context_tokens: tuple[int, int] = (352, 464)
    tool_tokens: tuple[int, int] = (20, 36)
    question_tokens: int = 8
    answer_tokens: int = 8
    chats: int = 60  # three of four sessions never return: so it is in Mooncake's trace
    chat_tokens: tuple[int, int] = (320, 480)
    stated: float = 0.7  # of the pauses: that there is one, and how long
    silent: float = 0.15  # of the pauses: nothing at all; the rest say only that there is one


def build_tier_workload(vocabulary: int) -> Workload:
    scale = TierScale()
    writer = Writer(np.random.default_rng(11), vocabulary)
    heads = system_prompts(writer, _KINDS)
    agents = [_agent(writer, scale, heads[i % _KINDS], i) for i in range(scale.agents)]
    span_s = max(session.starts_s + _nominal_s(session) for session in agents)
    chats = [_chat(writer, scale, i, span_s) for i in range(scale.chats)]
    return Workload(tuple(sorted([*agents, *chats], key=lambda session: session.starts_s)))


def shortened(workload: Workload, turns: int) -> Workload:
    return Workload(tuple(replace(s, turns=s.turns[:turns]) for s in workload.sessions))


def chats(workload: Workload, count: int) -> Workload:
    """The first ``count`` sessions of one turn."""
    single = [session for session in workload.sessions if len(session.turns) == 1]
    return Workload(tuple(single[:count]))


def paced(workload: Workload, pace: float) -> Workload:
    """The same requests, further apart: all that lasts in the script lasts ``pace`` times as long.

    Pauses in seconds mean nothing by themselves: on a machine half as fast the same script is twice
    the load, and a queue is measured where the tiers should be.
    """
    return Workload(tuple(_paced_session(session, pace) for session in workload.sessions))


def _paced_session(session: Session, pace: float) -> Session:
    turns = tuple(
        replace(turn, pause_s=pace * turn.pause_s, hints=_paced_hints(turn.hints, pace))
        for turn in session.turns
    )
    return replace(session, starts_s=pace * session.starts_s, turns=turns)


def _paced_hints(hints: dict[str, Any] | None, pace: float) -> dict[str, Any] | None:
    if hints is None or "expected_return_s" not in hints:
        return hints
    return {**hints, "expected_return_s": round(pace * hints["expected_return_s"], 2)}


def returning(workload: Workload) -> dict[str, Turn]:
    """Turns that come back from a tool, each with the turn before it, by the former's name."""
    return {
        after.name: before
        for session in workload.sessions
        for before, after in itertools.pairwise(session.turns)
    }


def reusable_tokens(before: Turn) -> tuple[int, int]:
    """What a returning turn could find, in full blocks: in all, and of its kind's shared head."""
    shared = [span for span in before.prompt if span.layer in _SHARED]
    head = sum(len(span.tokens) for span in shared)
    return len(before.token_ids) // BLOCK * BLOCK, head // BLOCK * BLOCK


_SHARED: Final = (
    SourceLayer.AXIOMS,
    SourceLayer.IDENTITY,
    SourceLayer.RULES,
    SourceLayer.CAPABILITIES,
)


def working_set_blocks(workload: Workload) -> int:
    """Blocks of every returning session's longest prompt, shared ones once."""
    prompts = [s.turns[-1].token_ids for s in workload.sessions if len(s.turns) > 1]
    prefixes = {
        tuple(prompt[:end]) for prompt in prompts for end in range(BLOCK, len(prompt) + 1, BLOCK)
    }
    return len(prefixes)


def _agent(writer: Writer, scale: TierScale, head: tuple[Span, ...], index: int) -> Session:
    """A session whose prompt grows by the scripted answer, a tool's result and a question."""
    name = f"agent-{index}"
    prompt = (*head, writer.span(SourceLayer.CONTEXT, *scale.context_tokens))
    count = int(writer.random.integers(scale.turns[0], scale.turns[1] + 1))
    pauses = [0.0, *(float(writer.random.uniform(*scale.tool_pause_s)) for _ in range(count - 1))]
    turns: list[Turn] = []
    for number in range(count):
        if number:
            prompt += (writer.span(SourceLayer.TOOL_RESULT, *scale.tool_tokens),)
        prompt += (writer.span(SourceLayer.USER_TURN, scale.question_tokens),)
        pause_s = pauses[number + 1] if number + 1 < count else None
        hints = {"session": name, **_signals(writer, scale, pause_s)}
        turns.append(Turn(name, number, prompt, scale.answer_tokens, pauses[number], hints))
        prompt += (writer.span(SourceLayer.GENERATION, scale.answer_tokens),)
    return Session(name, index * scale.agent_every_s, tuple(turns))


def _signals(writer: Writer, scale: TierScale, pause_s: float | None) -> dict[str, Any]:
    """What the harness says at a turn's end; always as many draws, whatever it says."""
    draw = float(writer.random.uniform())
    error = float(writer.random.uniform(-EXPECTATION_ERROR, EXPECTATION_ERROR))
    if pause_s is None:
        return {"session_ended": True}
    if draw < scale.silent:
        return {}
    if draw < 1 - scale.stated:
        return {"waiting_for_tool": True}
    return {"waiting_for_tool": True, "expected_return_s": round(pause_s * (1 + error), 2)}


def _chat(writer: Writer, scale: TierScale, index: int, span_s: float) -> Session:
    """One question about one pasted text; every other caller says that it is over."""
    name = f"chat-{index}"
    prompt = (
        writer.span(SourceLayer.USER_TURN, scale.question_tokens),
        writer.span(SourceLayer.CONTEXT, *scale.chat_tokens),
    )
    hints = {"session": name, "session_ended": True} if index % 2 == 0 else None
    starts = span_s * (0.05 + 0.9 * (index + float(writer.random.uniform())) / scale.chats)
    return Session(name, starts, (Turn(name, 0, prompt, scale.answer_tokens, 0.0, hints),))


def _nominal_s(session: Session) -> float:
    return sum(turn.pause_s for turn in session.turns)


POOL_BLOCKS: Final = 176
"""KV blocks of every arm: about a third of what the agents will ask for again."""

WARM_GIB: Final = 0.125  # host memory of the arms with tiers: 512 blocks of the bench's own model

MAX_MODEL_LEN: Final = 1536

_WARM: Final = ("AITHER_KVCACHE_WARM_GIB", str(WARM_GIB))
_NO_HOLD: Final = ("AITHER_KVCACHE_ADMISSION", "0")  # what tiers gain, and nothing else
_REACTIVE: Final = ("AITHER_KVCACHE_PREFETCH", "0")
_EVERYTHING: Final = ("AITHER_KVCACHE_SPILL", "all")

_FIRST_REPORT_S: Final = 10.0
_WARM_UP_CHATS, _PACE_CHATS = 4, 20
_PACES: Final = (0.5, 5.0)
_REPORT_S: Final = 1.5  # until the sidecar has the engine's newest report


@dataclass(frozen=True, slots=True)
class Arm:
    name: str
    graph: bool
    settings: tuple[tuple[str, str], ...] = ()

    def plan(self, model: str, out: Path, blocks: int | None = POOL_BLOCKS) -> ServerPlan:
        """What to start; ``blocks=None`` leaves the pool's size to vLLM."""
        return ServerPlan(
            model, self.graph, out, blocks=blocks, max_model_len=MAX_MODEL_LEN, name=self.name,
            settings=self.settings,
        )  # fmt: skip

    @property
    def tiers(self) -> bool:
        return _WARM in self.settings


STOCK: Final = Arm("stock", graph=False)
TIERS: Final = Arm("tiers", graph=True, settings=(_NO_HOLD, _WARM))
REACTIVE: Final = Arm("reactive", graph=True, settings=(_NO_HOLD, _WARM, _REACTIVE))
SPILL_ALL: Final = Arm("spill_all", graph=True, settings=(_NO_HOLD, _WARM, _REACTIVE, _EVERYTHING))
ARMS: Final = (STOCK, TIERS, REACTIVE, SPILL_ALL)


def read_counts(report: Mapping[str, Any]) -> TierCounts:
    return TierCounts(
        **{field.name: report[field.name] for field in dataclasses.fields(TierCounts)}
    )


@dataclass(frozen=True, slots=True)
class PassRecord:
    result: PassResult
    sources: dict[str, float]
    tiers: TierCounts | None


@dataclass(frozen=True, slots=True)
class ArmRecord:
    """What one arm did; a pass that was not asked for is None."""

    arm: str
    sequential: PassRecord | None
    concurrent: PassRecord | None


def run_arm(
    plan: ServerPlan,
    tiers: bool,
    sequential: Workload | None,
    concurrent: Workload | None,
    shown: DemoProgress,
) -> ArmRecord:
    shown.starting(plan.arm)
    with Server(plan) as server:
        probe = _Probe(server, tiers)
        first = probe.record(one_at_a_time, "one at a time", sequential, shown)
        if first is not None and concurrent is not None:
            server.reset_prefix_cache()
        second = probe.record(all_at_once, "with pauses", concurrent, shown)
    return ArmRecord(plan.arm, first, second)


def measured_pace(plan: ServerPlan, workload: Workload, shown: DemoProgress) -> float:
    """How slow this machine is: what a chat takes, served alone, over ``CHAT_S``; within bounds."""
    probe = chats(workload, _WARM_UP_CHATS + _PACE_CHATS)
    times: list[float] = []
    shown.starting("pace")
    with Server(plan) as server:
        shown.passing("pace", "one at a time", len(probe.in_order()))
        for session in probe.sessions:
            alone = Workload((session,))
            times.append(asyncio.run(one_at_a_time(server.url, alone, shown.answered)).wall_s)
    return min(max(median(times[_WARM_UP_CHATS:]) / CHAT_S, _PACES[0]), _PACES[1])


class _Probe:
    """Reads a server's counters around a pass."""

    def __init__(self, server: Server, tiers: bool) -> None:
        self._server = server
        self._tiers = tiers

    def record(
        self, how: Any, title: str, workload: Workload | None, shown: DemoProgress
    ) -> PassRecord | None:
        if workload is None:
            return None
        shown.passing(self._server.plan.arm, title, len(workload.in_order()))
        sources, tiers = own_counts(self._server.url).sources, self._tier_counts()
        result = asyncio.run(how(self._server.url, workload, shown.answered))
        after = own_counts(self._server.url).sources
        grown = {name: count - sources.get(name, 0.0) for name, count in after.items()}
        moved = None if tiers is None else self._after(tiers)
        return PassRecord(result, grown, moved)

    def _after(self, before: TierCounts) -> TierCounts:
        time.sleep(_REPORT_S)
        counts = self._tier_counts()
        assert counts is not None
        return counts.since(before)

    def _tier_counts(self) -> TierCounts | None:
        if not self._tiers:
            return None
        url = self._server.sidecar_url()
        deadline = time.monotonic() + _FIRST_REPORT_S
        while time.monotonic() < deadline:
            status = httpx.get(f"{url}/status", timeout=10.0, trust_env=False).json()
            for engine in status["engines"]:
                if report := engine.get("tiers"):
                    return read_counts(report)
            time.sleep(0.5)
        raise ServerError(
            f"the arm {self._server.plan.arm} runs without tiers; the end of its log:\n"
            + self._server.log_tail()
        )
