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

    @property
    def prefill_tokens_per_s(self) -> float:
        """That computing prompts reaches: measured by the ends of steps where the engine has tiers,
        else by their beginnings; 0: by neither."""
        for report in (self.tiers, self.pressure):
            if report is not None and report.prefill_tokens_per_s:
                return report.prefill_tokens_per_s
        return 0.0

    @property
    def copy_room(self) -> int:
        """Blocks that its host memory and disk can hold; 0: it has neither."""
        return 0 if self.tiers is None else self.tiers.warm_capacity + self.tiers.cold_capacity
