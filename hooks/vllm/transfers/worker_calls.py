"""The calls that vLLM's workers make to the connector."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from .no_tiers import NoWorker
from .worker import TierMetadata, TierWorkerMetadata, WorkerSide


class WorkerCalls(KVConnectorBase_V1):  # type: ignore[misc]
    """The half of a connector that a worker calls.

    Attributes:
        worker: Moves this worker's shard of the blocks, if the engine has tiers.
    """

    worker: WorkerSide | NoWorker = NoWorker()

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Take the paged memory that blocks move out of and into."""
        self.worker.register(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin this step's transfers; none waits for another."""
        if isinstance(self._connector_metadata, TierMetadata):
            self.worker.submit(self._connector_metadata.work)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose loads ended, whether they succeeded or not."""
        return None, self.worker.take_finished() or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Failed blocks of those requests: vLLM computes them."""
        return self.worker.take_failed()

    def build_connector_worker_meta(self) -> TierWorkerMetadata | None:
        """What was moved since the last step."""
        answer = self.worker.take_answer()
        return TierWorkerMetadata(answer) if answer else None

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request waits for its load as a whole."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: blocks are copied when they are about to be evicted."""

    def wait_for_save(self) -> None:
        """Do nothing."""
