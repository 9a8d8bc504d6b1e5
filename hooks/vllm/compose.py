"""Composes what vLLM is told of our connector: its transfer configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .settings import CONNECTOR, CONNECTOR_MODULE, ENDPOINT_KEY, ENDS_KEY, LAYERS_KEY, TIERS_KEY

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig

    from ..tiers.budget import TierSettings


def own_transfer_config(
    endpoint: str, tiers: TierSettings | None = None, ends: str = "", layers: str = ""
) -> KVTransferConfig:
    """A transfer configuration with our connector.

    Args:
        ends: By which marks answers end, as ``EndMarks.text``; empty: nobody knows.
        layers: With which borders messages begin, as ``BorderTable.text``; empty: nobody knows.
    """
    from vllm.config import KVTransferConfig

    extra: dict[str, Any] = {ENDPOINT_KEY: endpoint}
    if tiers is not None:
        extra[TIERS_KEY] = tiers.plain()
    if ends:
        extra[ENDS_KEY] = ends
    if layers:
        extra[LAYERS_KEY] = layers
    config = KVTransferConfig(
        kv_connector=CONNECTOR,
        kv_connector_module_path=CONNECTOR_MODULE,
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config=extra,
    )
    if tiers is not None:
        return config
    # vLLM takes every role for KV on the move: a worker would create the connector and call it
    # for each layer, attention backends would be chosen for it, the scheduler would hold freed
    # blocks back (consumer) or offload partial tails (producer). Without a role the scheduler
    # alone has a connector, and everything else is what it is in stock vLLM. The constructor
    # insists on one, so it goes afterwards.
    config.kv_role = None
    return config
