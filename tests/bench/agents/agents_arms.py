"""The arms of ``bench agents``: how each server is started, what it is told, and what it did."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Final

from kvgraph.hooks.requests.ends import EndMarks
from kvgraph.hooks.settings import ENDS_VARIABLE

from ..recorded.agents_forcing import OPTIONS
from ..recorded.agents_requests import SHRINK, AgentRequest
from ..recorded.agents_text import endings
from ..serving.model import vocabulary_size
from ..serving.own_counts import OwnCounts, own_counts
from ..serving.progress import DemoProgress
from ..serving.vllm_server import Server, ServerPlan, check_advised
from ..serving.workload import BLOCK
from .agents_pass import AgentPass, Telling, one_by_one

SILENT: Final = Telling()

_FLOAT_BYTES: Final = 4  # servers of benches run in float32


@dataclass(frozen=True, slots=True)
class AgentArm:
    """One way to serve recorded agents.

    Attributes:
        graph: Whether ``AITHER_KVCACHE_GRAPH=1`` is set.
        telling: What callers say.
        hosted: Whether the arm has host memory.
        settings: Further environment variables.
        options: Further words of the server's command line.
        marked: Whether the engine knows with which tokens recorded answers end, as it would from
            the chat template of a model that calls tools.
    """

    name: str
    graph: bool
    telling: Telling = SILENT
    hosted: bool = False
    settings: tuple[tuple[str, str], ...] = ()
    options: tuple[str, ...] = ()
    marked: bool = False


STOCK: Final = AgentArm("stock", graph=False)
DEFAULT: Final = AgentArm("default", graph=True)
MARKED: Final = AgentArm("marked", graph=True, marked=True)
"""Nothing is said, and the ends of answers are read."""
HINTS: Final = AgentArm("hints", graph=True, telling=Telling(hinted=True))
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
)
"""A host tier without any knowledge: copies of all that goes, the oldest dropped first."""
QUIET_TIERS: Final = AgentArm("quiet_tiers", graph=True, hosted=True, options=_STEPS)
"""Nothing is said, and there is host memory."""
TIERS: Final = AgentArm(
    "tiers", graph=True, telling=Telling(hinted=True), hosted=True, options=_STEPS
)
BUSY: Final = AgentArm("busy", graph=True, telling=Telling(hinted=True, layered=True))
"""Stated system prompts while other processes keep every core busy; see ``agents_busy``."""
ARMS: Final = (STOCK, DEFAULT, MARKED, HINTS, HOST_LRU, QUIET_TIERS, TIERS, BUSY)


@dataclass(frozen=True, slots=True)
class Room:
    """What every server of a run has: a model, blocks in the pool, and blocks in host memory."""

    model: str
    out: Path
    pool: int
    max_model_len: int
    host: int = 0

    def plan(self, arm: AgentArm, name: str) -> ServerPlan:
        """What to start; ``name`` is the log's."""
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
    """One arm on one pool, once.

    Attributes:
        name: Of its log and its recording.
        pace: Seconds that a recorded second took; None: no clock was waited for.
        own: What vLLM counted.
    """

    arm: str
    name: str
    pool: int
    host: int
    pace: float | None
    passed: AgentPass
    own: OwnCounts

    def took_s(self) -> list[float]:
        """Seconds that the engine took for each request: what its client saw, less what HTTP, API
        process and queue took of that on the mean, by the engine's own clock."""
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
    """Start the arm's server, send it every request, end it.

    Args:
        number: Of the run, where an arm runs several times; in the log's name.

    Raises:
        ServerError: It did not start, or a graph's arm ran without its graph.
        CompletionError: A request was refused.
        AnswerError: The server did not give the recorded answers.
    """
    host = room.host if arm.hosted else 0
    room = replace(room, host=host)
    tag = "-".join(str(part) for part in (arm.name, room.pool, host, number) if part)
    shown.starting(tag)
    with Server(room.plan(arm, tag)) as server:
        if arm.graph:
            check_advised(server)
        shown.passing(tag, "one at a time", len(requests))
        passed = asyncio.run(one_by_one(server.url, requests, arm.telling, shown.answered, pace))
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
