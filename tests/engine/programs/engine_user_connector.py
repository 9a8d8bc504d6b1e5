"""A KV connector as a user might have one: counts its calls and moves nothing."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)


class UserConnector(KVConnectorBase_V1):  # type: ignore[misc]
    steps = 0
    finished = 0
    params_seen = 0

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        UserConnector.params_seen += "mine" in (request.kv_transfer_params or {})
        return 0, False

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        UserConnector.steps += 1
        return KVConnectorMetadata()

    def request_finished(self, request: Any, block_ids: list[int]) -> Any:
        UserConnector.finished += 1
        return False, {"theirs": len(block_ids)}

    def update_state_after_alloc(self, *_: Any) -> None: ...
    def start_load_kv(self, *_: Any, **__: Any) -> None: ...
    def wait_for_layer_load(self, *_: Any) -> None: ...
    def save_kv_layer(self, *_: Any, **__: Any) -> None: ...
    def wait_for_save(self) -> None: ...
