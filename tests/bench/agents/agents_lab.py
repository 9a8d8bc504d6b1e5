"""The lab on the very requests that a real engine got: what LRU, Belady and policies find."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from kvgraph.advisor.replay.arms import BY_DEFAULT, HINTS, Settings
from kvgraph.advisor.replay.arms import run_arm as replay
from kvgraph.advisor.replay.fast import lru_hits
from kvgraph.advisor.replay.graph_order import Planning
from kvgraph.advisor.replay.simulator import Load
from kvgraph.advisor.replay.trace import Trace

from ..errors import TrafficError
from ..recorded.agents_requests import AgentRequest, engine_trace
from ..serving.workload import BLOCK

NULL_BLOCK: Final = 1
"""Of a pool, vLLM's own; it holds nothing."""

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
        """Share of all prompt tokens that were found."""
        return int(self.hits.sum()) * BLOCK / self.prompt_tokens


def default_policy(hinted: bool) -> str:
    """The lab's name of the policy that a sidecar runs with no configuration."""
    return BY_DEFAULT + HINTS if hinted else BY_DEFAULT


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
