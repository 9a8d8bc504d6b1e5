"""What engines last reported about themselves."""

from __future__ import annotations

from dataclasses import dataclass

from ..messages.events import AdmissionReport, AdviceApplied, EngineHello, Pressure, TierReport


@dataclass(slots=True)
class EngineWords:
    """One engine's latest report of each kind; None if it never sent one."""

    hello: EngineHello | None = None
    pressure: Pressure | None = None
    applied: AdviceApplied | None = None
    tiers: TierReport | None = None
    admission: AdmissionReport | None = None
