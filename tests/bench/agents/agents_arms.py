"""The arms of ``bench agents``: how each server is started, what it is told, and what it did."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Final

import numpy as np
import numpy.typing as npt
from kvgraph.advisor.replay.arms import BY_DEFAULT, Settings
from kvgraph.advisor.replay.arms import HINTS as HINTED
from kvgraph.advisor.replay.arms import run_arm as replay
from kvgraph.advisor.replay.fast import lru_hits
from kvgraph.advisor.replay.graph_order import Planning
from kvgraph.advisor.replay.simulator import Load
from kvgraph.advisor.replay.trace import Trace
from kvgraph.graph.types import LAYER_BY_NAME, SourceLayer
from kvgraph.hooks.requests.ends import EndMarks
from kvgraph.hooks.settings import ENDS_VARIABLE

from ..errors import AnswerError, CompletionError, TrafficError
from ..recorded.agents_forcing import OPTIONS
from ..recorded.agents_requests import (
    SHRINK,
    AgentRequest,
    Kind,
    endings,
    engine_trace,
    kind_of,
)
from ..serving.cache_ledger import Digest, OwnCounts, layers_of, own_counts
from ..serving.completions import Answer, OnAnswer, PassResult, open_client, send
from ..serving.model import vocabulary_size
from ..serving.progress import DemoProgress
from ..serving.vllm_server import Server, ServerPlan
from ..serving.workload import BLOCK

NULL_BLOCK: Final = 1  # of a pool, vLLM's own; it holds nothing

KEPT_BACK: Final = NULL_BLOCK + 1
"""Blocks of a pool that hold nothing cached: a running prompt's last one, too."""

ANSWERED_S: Final = 0.007
"""Seconds from what an early ranking knows until the engine has it: the median of 180 rankings in
a run of this bench whose client wrote their age down (quartiles: 5 and 35 ms)."""

LRU: Final = "lru"
BELADY: Final = "belady"


@dataclass(frozen=True, slots=True)
class LabRun:
    """One policy on one pool; ``hits`` are prompt blocks found, a request."""

    policy: str
    pool: int
    hits: npt.NDArray[np.int32]
    prompt_tokens: int

    @property
    def share(self) -> float:
        return int(self.hits.sum()) * BLOCK / self.prompt_tokens


def default_policy(hinted: bool) -> str:
    """The lab's name of the policy that a sidecar runs with no configuration."""
    return BY_DEFAULT + HINTED if hinted else BY_DEFAULT


def lab_run(trace: Trace, policy: str, pool: int) -> LabRun:
    """Replay ``trace`` with what a pool of ``pool`` blocks can hold.

    Requests take as long as the engine took: what a policy learns of one as that ends is too late
    for the next one, where that follows at once. A running prompt's last block is held then.
    Belady's bound is played in no time, and such a block is kept back for it.
    """
    if policy == BELADY:
        hits = replay(policy, trace, pool - KEPT_BACK, Settings())
    else:
        planning = Planning(pressing_delay_s=ANSWERED_S)
        settings = Settings(planning, load=Load(as_recorded=True))
        hits = replay(policy, trace, pool - NULL_BLOCK, settings)
    return LabRun(policy, pool, hits, int(trace.input_tokens.sum()))


def pool_for(requests: Sequence[AgentRequest], share: float, least: int, scratch: Path) -> int:
    """The least pool of at least ``least`` blocks in which LRU finds ``share`` of the prompt."""
    trace = engine_trace(requests, [request.at for request in requests], 1.0, scratch)
    wanted = share * float(trace.input_tokens.sum()) / BLOCK
    low, high = least, max(least, trace.num_blocks + KEPT_BACK)
    if lru_hits(trace, high - KEPT_BACK).sum() < wanted:
        raise TrafficError(
            f"no pool lets LRU find {share:.0%} of these prompts: more requests or fewer users "
            "would do"
        )
    while low < high:
        middle = (low + high) // 2
        if lru_hits(trace, middle - KEPT_BACK).sum() < wanted:
            low = middle + 1
        else:
            high = middle
    return low


@dataclass(frozen=True, slots=True)
class Telling:
    """What callers tell a server: nothing to stock, which could not read it."""

    hinted: bool = False  # sessions, ends, tool pauses and their rough length
    layered: bool = False  # where tools and system prompt lie in a prompt


@dataclass(frozen=True, slots=True)
class AgentPass:
    """The requests answered, and seconds after the pass began; the names of those that failed."""

    result: PassResult
    sent_s: tuple[float, ...]
    failed: tuple[str, ...] = ()
    arm: str = ""

    @property
    def share(self) -> float:
        """Share of the answered prompts' tokens that were not computed."""
        return self.result.cached_tokens / max(1, self.result.prompt_tokens)


Pick = Callable[[str, Sequence[int]], int]
"""Picks an engine's number for a session's request, given how many requests run at each."""


def only_one(session: str, running: Sequence[int]) -> int:
    """A ``Pick`` where there is but one address."""
    return 0


Midway = Callable[[int], Awaitable[None]]
"""What happens once half of the requests were sent and answered, told how many are in flight."""


@dataclass
class Sender:
    """Sends requests when they are due, and keeps what comes back, in order of arrival. ``pace``:
    seconds that a recorded second takes; 0: each as soon as the one before is answered. ``arm`` is
    in its sessions' names, so that no pass continues sessions of another; ``salted``: it salts the
    prefix cache too, since engines still have what other passes asked for. ``midway`` happens in
    the middle.
    """

    urls: Sequence[str]
    requests: Sequence[AgentRequest]
    telling: Telling
    on_answer: OnAnswer
    pace: float = 0.0
    pick: Pick = only_one
    arm: str = ""
    salted: bool = False
    midway: Midway | None = None
    tolerant: bool = False

    def one_by_one(self) -> AgentPass:
        return asyncio.run(self.play([self.requests]))

    def side_by_side(self) -> AgentPass:
        """Send every session's requests in order; sessions do not wait for each other."""
        return asyncio.run(self.play(self._sessions()))

    async def play(self, lines: Iterable[Sequence[AgentRequest]] | None = None) -> AgentPass:
        """Send lines of requests side by side; without any, each session's. Raises AnswerError: a
        server did not give the recorded answer.
        """
        self._answers: dict[str, tuple[float, Answer]] = {}
        self._failed: list[str] = []
        self._running = [0] * len(self.urls)
        self._half, self._began = asyncio.Event(), perf_counter()
        try:
            async with contextlib.AsyncExitStack() as stack, asyncio.TaskGroup() as group:
                self._clients = [
                    await stack.enter_async_context(open_client(url)) for url in self.urls
                ]
                if self.midway is not None:
                    group.create_task(self._at_half(self.midway))
                for line in lines or self._sessions():
                    group.create_task(self._send_all(line))
        except ExceptionGroup as failed:  # the first to fail; the others were cancelled for it
            raise failed.exceptions[0] from None
        wall_s = perf_counter() - self._began
        found = [self._answers[r.name] for r in self.requests if r.name in self._answers]
        result = PassResult(tuple(answer for _, answer in found), wall_s)
        sent_s = tuple(at for at, _ in found)
        return AgentPass(result, sent_s, tuple(self._failed), self.arm)

    def _sessions(self) -> Iterable[Sequence[AgentRequest]]:
        sessions: dict[str, list[AgentRequest]] = {}
        for request in self.requests:
            sessions.setdefault(request.session, []).append(request)
        return sessions.values()

    async def _send_all(self, line: Sequence[AgentRequest]) -> None:
        for request in line:
            due = self._began + self.pace * (request.at - self.requests[0].at)
            await asyncio.sleep(max(0.0, due - perf_counter()))
            await self._send(request)
            if 2 * (len(self._answers) + len(self._failed)) >= len(self.requests):
                self._half.set()

    async def _send(self, request: AgentRequest) -> None:
        if self.arm:
            request = replace(request, session=f"{self.arm}-{request.session}")
        body = request.body(self.pace, self.telling.hinted, self.telling.layered)
        if self.salted:
            body["cache_salt"] = self.arm
        number = self.pick(request.session, self._running)
        self._running[number] += 1
        sent_s = perf_counter() - self._began
        try:
            answer = await send(self._clients[number], request.name, body)
        except CompletionError:
            if not self.tolerant:
                raise
            self._failed.append(request.name)
            return
        finally:
            self._running[number] -= 1
        check_answer(request, answer)
        self._answers[request.name] = sent_s, answer
        self.on_answer(answer)

    async def _at_half(self, midway: Midway) -> None:
        await self._half.wait()
        await midway(sum(self._running))


def check_answer(request: AgentRequest, answer: Answer) -> None:
    """An answer of another length would be another text in the next prompt."""
    if answer.output_tokens != len(request.answer):
        raise AnswerError(
            f"request {request.name} was answered with {answer.output_tokens} tokens, recorded "
            f"were {len(request.answer)}: the server did not load the bench's logits processor"
        )


SILENT: Final = Telling()
EVERYTHING: Final = Telling(hinted=True, layered=True)

_FLOAT_BYTES: Final = 4  # servers of benches run in float32


@dataclass(frozen=True, slots=True)
class AgentArm:
    name: str
    graph: bool  # whether ``AITHER_KVCACHE_GRAPH=1`` is set
    telling: Telling = SILENT  # what callers say
    hosted: bool = False  # whether the arm has host memory
    settings: tuple[tuple[str, str], ...] = ()  # further environment variables
    options: tuple[str, ...] = ()  # further words of the server's command line
    # whether the engine knows with which tokens recorded answers end, as it would from the chat
    # template of a model that calls tools
    marked: bool = False


STOCK: Final = AgentArm("stock", graph=False)
DEFAULT: Final = AgentArm("default", graph=True)
MARKED: Final = AgentArm("marked", graph=True, marked=True)
"""Nothing is said, and the ends of answers are read."""
HINTS: Final = AgentArm("hints", graph=True, telling=EVERYTHING)
_STEPS: Final = ("--max-num-batched-tokens", str(8192 // SHRINK))
"""A large GPU's 8,192 tokens per step (vLLM's default for a server there), made smaller as all else
is. Copies are begun some steps ahead: a step of 2,048 takes a third of such a pool, and all of the
host memory would hold copies of what the pool still has."""
HOST_LRU: Final = AgentArm(
    "host_lru",
    graph=True,
    hosted=True,
    options=_STEPS,
    settings=(
        ("KVGRAPH_POLICY__NAME", "lru"),
        ("AITHER_KVCACHE_SPILL", "all"),
        ("AITHER_KVCACHE_PREFETCH", "0"),
    ),
)  # A host tier without any knowledge: copies of all that goes, the oldest dropped first
QUIET_TIERS: Final = AgentArm("quiet_tiers", graph=True, hosted=True, options=_STEPS)
"""Nothing is said, and there is host memory."""
TIERS: Final = AgentArm("tiers", graph=True, telling=EVERYTHING, hosted=True, options=_STEPS)
ARMS: Final = (STOCK, DEFAULT, MARKED, HINTS, HOST_LRU, QUIET_TIERS, TIERS)


@dataclass(frozen=True, slots=True)
class Room:
    """What every server of a run has: a model, blocks in the pool, and blocks in host memory."""

    model: str
    out: Path
    pool: int
    max_model_len: int
    host: int = 0

    def plan(self, arm: AgentArm, name: str) -> ServerPlan:
        settings = arm.settings
        if arm.hosted:
            gib = self.host * block_bytes(self.model) / 2**30
            settings = (*settings, ("AITHER_KVCACHE_WARM_GIB", f"{gib:.6f}"))
        if arm.marked:
            settings = (*settings, (ENDS_VARIABLE, recorded_marks(vocabulary_size(self.model))))
        return ServerPlan(
            self.model, arm.graph, self.out, blocks=self.pool, max_model_len=self.max_model_len,
            name=name, settings=settings, options=(*OPTIONS, *arm.options),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class AgentRun:
    arm: str
    name: str  # of its log and its recording
    pool: int
    host: int
    pace: float | None  # seconds that a recorded second took; None: no clock was waited for
    passed: AgentPass
    own: OwnCounts  # what vLLM counted

    def took_s(self) -> list[float]:
        """Seconds that the engine took for each request: what its client saw, less what HTTP, API
        process and queue took of that on the mean, by the engine's own clock.
        """
        seen = [answer.latency_s for answer in self.passed.result.answers]
        aside = fmean(seen) - self.own.mean_served_s
        return [max(0.0, seconds - aside) for seconds in seen]


def run_arm(
    arm: AgentArm,
    room: Room,
    requests: Sequence[AgentRequest],
    pace: float | None,
    shown: DemoProgress,
    number: int = 0,
) -> AgentRun:
    host = room.host if arm.hosted else 0
    room = replace(room, host=host)
    tag = "-".join(str(part) for part in (arm.name, room.pool, host, number) if part)
    shown.starting(tag)
    with Server(room.plan(arm, tag)) as server:
        shown.passing(tag, "one at a time", len(requests))
        sender = Sender([server.url], requests, arm.telling, shown.answered, pace or 0.0)
        passed = sender.one_by_one()
        return AgentRun(arm.name, tag, room.pool, host, pace, passed, own_counts(server.url))


def recorded_marks(vocabulary: int) -> str:
    """By which tokens recorded answers end, as an operator would state it."""
    call_end, turn_end = endings(vocabulary)
    return EndMarks(turn_ends=(turn_end,), call_ends=(call_end,)).text()


def longest(requests: Sequence[AgentRequest]) -> int:
    """Tokens of the longest prompt with its answer, in whole blocks: what a pool must hold."""
    tokens = max(len(request.prompt) + len(request.answer) for request in requests)
    return math.ceil(tokens / BLOCK) * BLOCK


def block_bytes(model: str) -> int:
    """Bytes of one KV block of ``model``, all layers together, from its configuration."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model).get_text_config()
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    per_token = 2 * config.num_hidden_layers * (config.num_key_value_heads or heads) * width
    return int(per_token) * _FLOAT_BYTES * BLOCK


_LAYERS: Final = {
    Kind.HEAD: SourceLayer.CONTEXT,  # where nobody says what it is
    Kind.USER: SourceLayer.USER_TURN,
    Kind.TOOL: SourceLayer.TOOL_RESULT,
    Kind.ANSWER: SourceLayer.GENERATION,
}


def layers_by_block(
    requests: Sequence[AgentRequest], vocabulary: int, size: int = BLOCK
) -> dict[Digest, SourceLayer]:
    known: dict[Digest, SourceLayer] = {}
    for request in requests:
        layers = [_LAYERS[kind_of(token, vocabulary)] for token in request.prompt]
        for name, start, end in request.layers:
            layers[start:end] = [LAYER_BY_NAME[name]] * (end - start)
        known.update(layers_of(request.prompt, layers, size))
    return known
