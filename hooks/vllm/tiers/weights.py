"""Detects calls of an engine that may change its weights, or say that they changed."""

from __future__ import annotations

import functools
import logging
from typing import Any, Final

from ..patching import Method, patch

logger = logging.getLogger(__name__)

_LEAVE_WEIGHTS: Final = frozenset(
    {
        "check_health", "checkpoint_prepare", "checkpoint_restore", "compute_weight_checksums",
        "get_compilation_match_table", "get_encoder_timing_stats", "get_model_inspection",
        "get_supported_tasks", "profile", "release_late_interaction_query_cache",
        "reset_encoder_cache", "reset_mm_cache", "save_sharded_state", "save_tensorized_model",
        "update_max_model_len",
    }
)  # fmt: skip
"""Methods of vLLM's workers that do not change weights. All others may, such as ``reload_weights``,
methods of a trainer's own worker, and functions sent to the workers.
"""


def follow_worker_calls() -> None:
    """Call ``weights_changed`` on the connector of every engine in this process when its workers
    are called from outside the engine in a way that may change weights, or when a trainer says that
    they have another version: it may have brought them on a road of its own.
    """
    try:
        from vllm.v1.engine.core import EngineCore

        patch(EngineCore, "collective_rpc", _followed)
        patch(EngineCore, "set_weight_version", _versioned)
    except (ImportError, AttributeError) as error:
        logger.warning("kvgraph: new weights are noticed by resets alone (%s)", error)


def _followed(original: Method) -> Method:
    @functools.wraps(original)
    def collective_rpc(self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, method, *args, **kwargs)
        finally:  # one that failed may have changed some
            if not (isinstance(method, str) and method in _LEAVE_WEIGHTS):
                _tell(_connector(self), method)

    return collective_rpc


def _versioned(original: Method) -> Method:
    @functools.wraps(original)
    def set_weight_version(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        finally:
            _tell(_connector(self), "set_weight_version")

    return set_weight_version


def _connector(core: Any) -> Any:
    return getattr(getattr(core, "scheduler", None), "connector", None)


def _tell(connector: Any, method: Any) -> None:
    changed = getattr(connector, "weights_changed", None)
    if changed is not None:
        changed(method if isinstance(method, str) else "a function")
