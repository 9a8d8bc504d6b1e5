"""The arms of the closed loop on paper."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class PaperArm:
    """One way to serve.

    Attributes:
        stock: Without our connector.
        longest_first: Who waits starts by the longest cached prefix: SGLang's order.
        hold: Whether new sessions wait for room.
        hinted: Whether clients name sessions, and say when they end or wait for a tool.
        layered: Whether they say where tools and rules stand, and are believed.
        unprotected: Whether nothing is protected, whatever is said.
        host: Blocks of host memory, for each block of the pool.
        ahead: It brings back what requests that wait lack, before their turn.
        plain: That memory takes all that goes and drops the oldest: nothing is known of it.
    """

    name: str
    stock: bool = False
    longest_first: bool = False
    hold: bool = False
    hinted: bool = False
    layered: bool = False
    unprotected: bool = False
    host: float = 0.0
    ahead: bool = False
    plain: bool = False

    @property
    def hosted(self) -> bool:
        """Whether there is host memory."""
        return self.host > 0.0


PAPER_STOCK: Final = PaperArm("stock", stock=True)
PAPER_LPM: Final = PaperArm("lpm", stock=True, longest_first=True)
PAPER_OFF: Final = PaperArm("off")
PAPER_HOLD: Final = PaperArm("hold", hold=True)
PAPER_TOLD: Final = PaperArm("hold_told", hold=True, hinted=True)
PAPER_HOST_LRU: Final = PaperArm("host_lru", host=1.0, plain=True)
PAPER_HOST_HOLD: Final = PaperArm("host_hold", host=1.0, hold=True)
PAPER_QUIET_TIERS: Final = PaperArm("quiet_tiers", host=1.0)
PAPER_QUEUED_TIERS: Final = PaperArm("queued_tiers", host=1.0, ahead=True)
PAPER_TIERS: Final = PaperArm("tiers", host=1.0, hinted=True)
PAPER_ARMS: Final = (
    PAPER_STOCK, PAPER_LPM, PAPER_OFF, PAPER_HOLD, PAPER_TOLD, PAPER_HOST_LRU, PAPER_HOST_HOLD,
)  # fmt: skip
