"""Host memory on paper: as plain LRU, with nothing said, and told everything.

And with nothing said, where requests that wait have their copies brought back before their turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from ...figures import Figures
from ...recorded.agents_requests import AgentRequest
from .closed_paper_arms import PAPER_HOST_LRU, PAPER_QUEUED_TIERS, PAPER_QUIET_TIERS, PAPER_TIERS
from .open_paper import OpenRun, play_open

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SIZES: Final = (0.5, 1.0, 2.0)
"""Blocks of host memory for each block of the pool."""
_ARMS: Final = (PAPER_HOST_LRU, PAPER_QUIET_TIERS, PAPER_QUEUED_TIERS, PAPER_TIERS)


@dataclass(frozen=True, slots=True)
class HostRun:
    """One arm with host memory, once; ``host``: blocks of it for each of the pool."""

    host: float
    run: OpenRun

    @property
    def computed(self) -> float:
        """Share of the prompt tokens that were computed."""
        return 1.0 - self.run.cached_share


def play_hosts(
    base: VllmConfig,
    blocks: int,
    requests: Sequence[AgentRequest],
    pace: float,
    playing: Callable[[str], None],
) -> list[HostRun]:
    """Every arm with every size of host memory, one request at a time.

    Args:
        blocks: Of the pool, the null block among them.
        pace: Seconds that a recorded second takes.
        playing: Told what is played next.
    """
    runs: list[HostRun] = []
    for host in SIZES:
        for arm in (replace(each, host=host) for each in _ARMS):
            playing(f"{arm.name}, host memory {host:g}")
            runs.append(HostRun(host, play_open(base, arm, blocks, requests, pace, 1)))
    return runs


def add_hosts(figures: Figures, runs: Sequence[HostRun]) -> None:
    """What each arm computes, of what plain LRU computes with as much host memory."""
    for host in dict.fromkeys(each.host for each in runs):
        plain, *others = (each for each in runs if each.host == host)
        figures.add(f"host_lru_share_{host:g}", plain.run.cached_share, "share of prompt")
        for each in others:
            ratio = each.computed / plain.computed
            figures.add(f"{each.run.arm}_recomputed_ratio_{host:g}", ratio, "tiers / plain", "≤ 1")
