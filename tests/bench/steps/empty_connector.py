"""A connector that does nothing: what vLLM itself charges for having one."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

_NOTHING = KVConnectorMetadata()


class EmptyConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    @property
    def requires_kv_delivery(self) -> bool:
        """False: nothing is handed over."""
        return False

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Do nothing."""

    def start_load_kv(self, forward_context: Any, **more: Any) -> None:
        """Do nothing."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **more: Any
    ) -> None:
        """Do nothing."""

    def wait_for_save(self) -> None:
        """Do nothing."""

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Do nothing."""

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return _NOTHING

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None
