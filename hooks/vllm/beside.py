"""Observing an engine whose user has a KV connector: that one stays what it is in stock vLLM.

Its configuration, its workers and its class's methods are not touched. The scheduler's instance
alone gets a class of its own, whose methods call the user's first, with whatever they were given,
and then let ours look.
"""

from __future__ import annotations

import copy
import functools
import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from .compose import own_transfer_config
from .settings import SIDECAR_VARIABLE
from .shapes import reason_to_decline

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    from .connector import KvGraphConnector

logger = logging.getLogger(__name__)

# What the scheduler tells a connector and ours wants to know as well.
FOLLOWED: Final = (
    "bind_kv_cache_manager", "on_new_request", "get_num_new_matched_tokens",
    "update_state_after_alloc", "build_connector_meta", "request_finished",
    "request_finished_all_groups", "shutdown",
)  # fmt: skip
WATCH: Final = "_kvgraph_watch"
_MARK: Final = "_kvgraph_wrapped"


def follow_connectors() -> None:
    """Observe every connector that vLLM's factory makes for a scheduler from now on."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    original = KVConnectorFactory.create_connector
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def create_connector(*args: Any, **kwargs: Any) -> Any:
        connector = original(*args, **kwargs)
        try:
            observe(connector)
        except Exception as error:
            logger.warning(
                "kvgraph: %s is not observed (%s: %s); it runs as in stock vLLM",
                type(connector).__name__, type(error).__name__, error,
            )  # fmt: skip
        return connector

    setattr(create_connector, _MARK, True)
    KVConnectorFactory.create_connector = staticmethod(create_connector)


def observe(connector: KVConnectorBase_V1) -> None:
    """Let ours look over the shoulder of a scheduler's ``connector``, if there is a sidecar."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from .connector import KvGraphConnector

    endpoint = os.environ.get(SIDECAR_VARIABLE)
    ours = isinstance(connector, KvGraphConnector)
    if ours or connector.role is not KVConnectorRole.SCHEDULER or not endpoint:
        return
    config = connector._vllm_config
    if reason_to_decline(config):
        return
    config = copy.copy(config)
    config.kv_transfer_config = own_transfer_config(endpoint)
    watch = KvGraphConnector(config, connector.role, connector._kv_cache_config)
    setattr(connector, WATCH, watch)
    stock: Any = type(connector)  # mypy takes no class for hashable
    connector.__class__ = observed_class(stock)


@functools.cache
def observed_class(base: Any) -> Any:
    """``base`` under its own name, whose followed methods tell ours as well."""
    methods = {name: _told(getattr(base, name), name) for name in FOLLOWED if hasattr(base, name)}
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base.__name__, (base,), {**names, **methods, "__doc__": base.__doc__})


def _told(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        _tell(getattr(self, WATCH), name, args, kwargs)
        return result

    return method


def _tell(watch: KvGraphConnector, name: str, args: tuple[Any, ...], kwargs: Any) -> None:
    try:
        getattr(watch, name)(*args, **kwargs)
    except Exception as error:  # ours is guarded inside; this is how another vLLM calls it
        watch.disable(name, error)
