"""What is still owed to vLLM when our scheduler side fails: no request may wait for ever."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from ..tiers.jobs import Load, TierAnswer, TierWork
from .tiering import TierCacheBridge

_NO_JOB: Final = 0  # jobs and copies are counted from one: this names none


class Rescue:
    """Sees loads through that were promised to vLLM before an error of ours.

    A load whose orders were never written is given to the workers as one that cannot succeed:
    they report it as failed, and vLLM computes the blocks. Jobs that are under way are heard to
    their end, so that blocks which they fill go back to the pool.
    """

    def __init__(self) -> None:
        self._bridge: TierCacheBridge | None = None
        self._broken: list[Load] = []

    @property
    def busy(self) -> bool:
        """Whether workers still have something to tell."""
        return self._bridge is not None and self._bridge.busy

    def adopt(self, bridge: TierCacheBridge | None) -> None:
        """Take over a bridge that takes no new decisions any more."""
        self._bridge = bridge

    def fail_load(self, request_id: str, block_ids: Sequence[int]) -> None:
        """A request waits for a load that nobody ordered."""
        blocks = tuple(block_ids)
        self._broken.append(Load(_NO_JOB, (_NO_JOB,) * len(blocks), blocks, {}, request_id))

    def work(self) -> TierWork:
        """What the workers are still to be told."""
        broken, self._broken = tuple(self._broken), []
        rest = self._bridge.outstanding() if self._bridge is not None else TierWork()
        return replace(rest, jobs=rest.jobs + broken)

    def answered(self, answer: TierAnswer) -> None:
        """What the workers did."""
        if self._bridge is not None:
            self._bridge.answered(answer)
            if not self._bridge.busy:
                self._bridge = None
