"""The link between an engine on paper and its host memory, by the engine's own clock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvgraph.advisor.replay.trace import HostLink
from kvgraph.hooks.vllm.tiers.worker import TierMetadata, TierWorkerMetadata

from ...paper.paper_engine import BLOCK_SIZE, PaperEngine
from ...paper.paper_model import Batch, aggregated, runner_output
from ...paper.paper_worker import LOADS, SPILLS
from ...recorded.agents_requests import SHRINK

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

_LANES: Final = (LOADS, SPILLS)  # a link carries both directions at once


class PaperLink:
    """Moves blocks there and back, in each direction one job after the other.

    Args:
        engine: With one worker, and host memory.
        link: What moving a recorded token's KV takes.
    """

    def __init__(self, engine: PaperEngine, link: HostLink | None = None) -> None:
        self._engine = engine
        (self._worker,) = engine.workers
        self._block_s = (link or HostLink()).seconds(1, BLOCK_SIZE * SHRINK)
        self._free_at = dict.fromkeys(_LANES, 0.0)  # when the job that leads a lane may begin

    def order(self, step: SchedulerOutput, now: float) -> None:
        """Take a step's orders; they begin at ``now``, behind those under way."""
        metadata = step.kv_connector_metadata
        for lane in _LANES:
            if self._worker.leading(lane) is None:
                self._free_at[lane] = now
        if isinstance(metadata, TierMetadata):
            self._worker.submit(metadata.work, self._worker.forwards)

    def reported(
        self, step: SchedulerOutput, tokens: dict[str, list[int]], now: float
    ) -> ModelRunnerOutput:
        """What a runner tells at the end of a step that gave ``tokens``, at ``now``."""
        batch = Batch(step, {}, [self._said(now)], runner_output(tokens))
        return aggregated(batch, self._engine.aggregator)

    def _said(self, now: float) -> KVConnectorOutput:
        from vllm.v1.outputs import KVConnectorOutput

        self._move(now)
        self._worker.forwards += 1
        finished, failed = self._worker.answers.take_loaded()
        answer = self._worker.answers.take_answer()
        return KVConnectorOutput(
            finished_recving=finished,
            invalid_block_ids=failed,
            kv_connector_worker_meta=TierWorkerMetadata(answer) if answer else None,
        )

    def _move(self, now: float) -> None:
        for lane in _LANES:
            while (copies := self._worker.leading(lane)) is not None:
                ends = self._free_at[lane] + copies * self._block_s
                if ends > now:
                    break
                self._free_at[lane] = ends
                for _half in range(2):
                    self._worker.advance(lane)
