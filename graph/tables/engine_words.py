"""What engines last said of themselves."""

from __future__ import annotations

from dataclasses import dataclass

from ..messages.events import AdmissionReport, AdviceApplied, EngineHello, Pressure, TierReport


@dataclass(slots=True)
class EngineWords:
    """One engine's last word of each kind; None where it never said one."""

    hello: EngineHello | None = None
    pressure: Pressure | None = None
    applied: AdviceApplied | None = None
    tiers: TierReport | None = None
    admission: AdmissionReport | None = None
