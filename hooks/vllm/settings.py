"""The names by which an engine is told of us."""

from __future__ import annotations

import logging
import math
import os
from typing import Final

logger = logging.getLogger(__name__)

SWITCH_VARIABLE: Final = "AITHER_KVCACHE_GRAPH"
SIDECAR_VARIABLE: Final = "AITHER_KVCACHE_SIDECAR"
CHILD_VARIABLE: Final = "AITHER_KVCACHE_CHILD"  # whose child the sidecar there is, if an engine's
ENDPOINT_KEY: Final = "kvgraph_endpoint"  # in the connector's extra config
TIERS_KEY: Final = "kvgraph_tiers"
CONNECTOR: Final = "KvGraphConnector"
CONNECTOR_MODULE: Final = "kvgraph.hooks.vllm.connector"
TESTED_VERSION: Final = "0.32"
PLUGIN_GROUP: Final = "vllm.general_plugins"
PROTECT_STALE_VARIABLE: Final = "AITHER_KVCACHE_PROTECT_STALE_S"
PROTECT_STALE_S: Final = 60.0
"""Chosen: longer than a sidecar takes to be started again with its snapshot, and so short that a
dead one does not shape the queue for long."""
LONGEST_PROTECT_STALE_S: Final = 3600.0
RESERVED_CPUS_VARIABLE: Final = "VLLM_CPU_NUM_OF_RESERVED_CPU"  # vLLM's own


def switched_on() -> bool:
    """Whether the environment asks for us: set, and not to 0, false, off or no."""
    value = os.environ.get(SWITCH_VARIABLE, "").strip().lower()
    return value not in ("", "0", "false", "off", "no")


def protect_stale_s() -> float:
    """How long protection outlives the last word of a sidecar, in seconds.

    A value that is not allowed is said, and the default taken.
    """
    text = os.environ.get(PROTECT_STALE_VARIABLE, "").strip()
    if not text:
        return PROTECT_STALE_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if 0 <= seconds <= LONGEST_PROTECT_STALE_S:
        return seconds
    logger.warning(
        "kvgraph: %s=%r is not allowed: seconds from 0 to %d; %d is taken",
        PROTECT_STALE_VARIABLE,
        text,
        LONGEST_PROTECT_STALE_S,
        PROTECT_STALE_S,
    )
    return PROTECT_STALE_S
