"""The names and variables by which an engine is configured."""

from __future__ import annotations

import logging
import math
import os
from typing import Final

logger = logging.getLogger(__name__)

SWITCH_VARIABLE: Final = "AITHER_KVCACHE_GRAPH"
SIDECAR_VARIABLE: Final = "AITHER_KVCACHE_SIDECAR"
CHILD_VARIABLE: Final = "AITHER_KVCACHE_CHILD"  # which engine's child the sidecar is, if any's
ENDPOINT_KEY: Final = "kvgraph_endpoint"  # in the connector's extra config
TIERS_KEY: Final = "kvgraph_tiers"
ENDS_KEY: Final = "kvgraph_ends"
ENDS_VARIABLE: Final = "AITHER_KVCACHE_ENDS"
"""Says by which marks answers end, as JSON, or 0: nobody reads why they end. Where it is not set,
the marks are learned from the chat template."""
LAYERS_KEY: Final = "kvgraph_layers"
LAYERS_VARIABLE: Final = "AITHER_KVCACHE_LAYERS"
"""0: nobody reads prompts' layers, and hints about messages are not understood. Our own processes
hand the borders of messages over in it, beside a connector of the user's."""
SECTIONS_VARIABLE: Final = "AITHER_KVCACHE_SECTIONS"
"""Which lines begin sections of a system text, and their layers, as a JSON object."""
CONNECTOR: Final = "KvGraphConnector"
CONNECTOR_MODULE: Final = "kvgraph.hooks.vllm.connector"
PLUGIN_GROUP: Final = "vllm.general_plugins"
PROTECT_STALE_VARIABLE: Final = "AITHER_KVCACHE_PROTECT_STALE_S"
PROTECT_STALE_S: Final = 60.0
"""Chosen: longer than a sidecar takes to be started again with its snapshot, and so short that a
dead one does not shape the queue for long."""
LONGEST_PROTECT_STALE_S: Final = 3600.0  # chosen
ADMISSION_VARIABLE: Final = "AITHER_KVCACHE_ADMISSION"
ADMISSION_BY_DEFAULT: Final = True
"""Whether new sessions may be held where the variable is not set. Either way, nobody is held but
while the sidecar measures that the engine computes again what sessions that go on held a moment
ago, and while prompts queue (``graph.waiting.saturation``)."""
HOLD_MAX_VARIABLE: Final = "AITHER_KVCACHE_HOLD_MAX_S"
LONGEST_HOLD_S: Final = 3600.0  # chosen
REFUSE_AFTER_VARIABLE: Final = "AITHER_KVCACHE_REFUSE_AFTER_S"
REFUSE_AFTER_S: Final = 60.0  # unless the variable says otherwise; chosen
SAMPLING_VARIABLE: Final = "AITHER_KVCACHE_SAMPLING"
SAMPLING_SHARE: Final = 0.002
"""Where the variable is 1, some decode steps show how sure the model is and where it looks. They
are given this share of the worker's CPU time (on a GPU, of the time of its decode steps), or the
share that the variable says. Off where it is not set. Chosen: with all else that is on, it stays
within half a percent of a step."""
RECALL_VARIABLE: Final = "AITHER_KVCACHE_RECALL"
RECALL_ALWAYS_VARIABLE: Final = "AITHER_KVCACHE_RECALL_ALWAYS"
"""Text that asks for it comes back also where computing it is quicker: to try recall on a small
model. Off where it is not set."""
RECALL_SHARED_VARIABLE: Final = "AITHER_KVCACHE_RECALL_SHARED"
"""Requests that name no tenant and have no cache salt find each other's text. Off where it is not
set: what comes back was computed behind what its own prompt held, and answers depend on that."""
ON: Final = ("1", "true", "on", "yes")  # what people write who mean on
OFF: Final = ("0", "false", "off", "no")  # what switches a switch off; all else switches it on
RESERVED_CPUS_VARIABLE: Final = "VLLM_CPU_NUM_OF_RESERVED_CPU"  # vLLM's own
RUST_FRONTEND_VARIABLE: Final = "VLLM_USE_RUST_FRONTEND"  # vLLM's own
WITHOUT_API: Final = (
    f"vLLM's Rust frontend ({RUST_FRONTEND_VARIABLE}) has no API process of Python's: hints about "
    "messages are not read, chats are told apart by their tokens alone, and no request that waits "
    "too long is refused; all that the engine does itself goes on, other hints count"
)


def switched_on() -> bool:
    """Whether the environment asks for us: set, and not to 0, false, off or no."""
    return _is_on(SWITCH_VARIABLE)


def has_python_api() -> bool:
    """Whether requests come through vLLM's API in Python, in which parts of ours live."""
    return os.environ.get(RUST_FRONTEND_VARIABLE, "").strip().lower() in ("", *OFF)


def admission_switched_on() -> bool:
    """Whether new sessions may be held while there is no room for them."""
    return _is_on(ADMISSION_VARIABLE, ADMISSION_BY_DEFAULT)


def recalls_always() -> bool:
    """Whether text comes back also where computing it is quicker."""
    return _is_on(RECALL_ALWAYS_VARIABLE)


def recall_is_shared() -> bool:
    """Whether all who name no tenant and have no salt may see one another."""
    return _is_on(RECALL_SHARED_VARIABLE)


def reads_ends() -> bool:
    """Whether the engine may read why answers end off their last tokens."""
    return os.environ.get(ENDS_VARIABLE, "").strip().lower() not in OFF


def reads_layers() -> bool:
    """Whether prompts' parts are told apart by the borders of their messages."""
    return os.environ.get(LAYERS_VARIABLE, "").strip().lower() not in OFF


def sampling_share() -> float:
    """The share of a worker's time that sampled decode steps may take; 0: none is sampled.

    A value that is not allowed leaves a warning, and the default is taken.
    """
    try:
        return read_sampling_share()
    except ValueError as error:
        logger.warning("kvgraph: %s; %s is taken", error, SAMPLING_SHARE)
        return SAMPLING_SHARE


def protect_stale_s() -> float:
    """How long protection outlives the last message of a sidecar, in seconds.

    A value that is not allowed leaves a warning, and the default is taken.
    """
    return _seconds(PROTECT_STALE_VARIABLE, PROTECT_STALE_S, LONGEST_PROTECT_STALE_S)


def hold_max_s(default: float) -> float:
    """How long a request is held at most, in seconds; a value that is not allowed as above."""
    return _seconds(HOLD_MAX_VARIABLE, default, LONGEST_HOLD_S)


def refuse_after_s() -> float:
    """After how many seconds a held request is refused, where that is asked for; as above."""
    return _seconds(REFUSE_AFTER_VARIABLE, REFUSE_AFTER_S, LONGEST_HOLD_S)


def read_seconds(variable: str, longest: float) -> float | None:
    """A variable's value in seconds; None where it is not set.

    Raises:
        ConfigError: It is not a number from 0 to ``longest``.
    """
    text = os.environ.get(variable, "").strip()
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if 0 <= seconds <= longest:
        return seconds
    from ...graph.errors import ConfigError  # not above: switched off, nothing of ours is loaded

    raise ConfigError(f"{variable}={text!r} is not allowed: seconds from 0 to {longest:.0f}")


def read_sampling_share() -> float:
    """As ``sampling_share``.

    Raises:
        ConfigError: The variable is neither a switch nor a share.
    """
    if not _is_on(SAMPLING_VARIABLE):
        return 0.0
    text = os.environ[SAMPLING_VARIABLE].strip().lower()
    if text in ON:
        return SAMPLING_SHARE
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if 0 < share < 1:
        return share
    from ...graph.errors import ConfigError  # as above

    raise ConfigError(f"{SAMPLING_VARIABLE}={text!r} is not allowed: 1, 0, or a share between")


def _is_on(variable: str, unset: bool = False) -> bool:
    value = os.environ.get(variable, "").strip().lower()
    return value not in OFF if value else unset


def _seconds(variable: str, default: float, longest: float) -> float:
    try:
        seconds = read_seconds(variable, longest)
    except ValueError as error:
        logger.warning("kvgraph: %s; %d is taken", error, default)
        return default
    return default if seconds is None else seconds
