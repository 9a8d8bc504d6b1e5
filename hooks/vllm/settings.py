"""The names by which an engine is told of us."""

from __future__ import annotations

import os
from typing import Final

SWITCH_VARIABLE: Final = "AITHER_KVCACHE_GRAPH"
SIDECAR_VARIABLE: Final = "AITHER_KVCACHE_SIDECAR"
ENDPOINT_KEY: Final = "kvgraph_endpoint"  # in the connector's extra config
TIERS_KEY: Final = "kvgraph_tiers"
BESIDE_KEY: Final = "kvgraph_beside"  # whether the user has a connector too
CONNECTOR: Final = "KvGraphConnector"
CONNECTOR_MODULE: Final = "kvgraph.hooks.vllm.connector"
TESTED_VERSION: Final = "0.32"
PLUGIN_GROUP: Final = "vllm.general_plugins"
RESERVED_CPUS_VARIABLE: Final = "VLLM_CPU_NUM_OF_RESERVED_CPU"  # vLLM's own


def switched_on() -> bool:
    """Whether the environment asks for us: set, and not to 0, false, off or no."""
    value = os.environ.get(SWITCH_VARIABLE, "").strip().lower()
    return value not in ("", "0", "false", "off", "no")
