"""Lets workers answer as in stock vLLM where we move nothing."""

from __future__ import annotations

import functools
from typing import Any, Final

_MARK: Final = "_kvgraph_wrapped"


def spare_aggregation() -> None:
    """Keep vLLM from collecting every worker's output of every step where nobody needs it.

    With any connector, an executor waits for the answers of all workers and merges them, instead of
    reading the one that has tokens. Ours has no part in the workers unless it has tiers.
    """
    from vllm.v1.executor.abstract import Executor

    original = Executor.init_kv_output_aggregator
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def init_kv_output_aggregator(self: Any, connector: Any, *args: Any, **kwargs: Any) -> Any:
        # Ray's executor asks for the aggregator wherever there is a transfer configuration.
        if moves_nothing(connector) and not getattr(self, "has_connector", False):
            return None
        return original(self, connector, *args, **kwargs)

    setattr(init_kv_output_aggregator, _MARK, True)
    Executor.init_kv_output_aggregator = init_kv_output_aggregator


def moves_nothing(connector: Any) -> bool:
    """Whether ``connector`` is ours, and no worker has one."""
    from .connector import KvGraphConnector

    return isinstance(connector, KvGraphConnector) and not connector.has_workers
