"""Patches that are applied when vLLM starts; parts that patch later do so beside their own code."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..settings import (
    CONNECTOR,
    CONNECTOR_MODULE,
    ENDPOINT_KEY,
    ENDS_KEY,
    LAYERS_KEY,
    TIERS_KEY,
    engine_settings,
)
from .patching import Method, after, patch
from .relied_on import Part
from .shapes import reason_to_decline
from .versions import live_misfits

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.v1.core.sched.scheduler import Scheduler

    from ..settings import TierSettings
    from .connector import KvGraphConnector

logger = logging.getLogger(__name__)


def spare_aggregation() -> None:
    """Keep vLLM from collecting every worker's output in every step when nobody needs it.

    With any connector, an executor waits for the answers of all workers and merges them, instead of
    reading the one with tokens. Our connector has no worker part unless it has tiers.
    """
    from vllm.v1.executor.abstract import Executor

    def spared(original: Method) -> Method:
        def init_kv_output_aggregator(self: Any, connector: Any, *args: Any, **kwargs: Any) -> Any:
            # Ray's executor asks for the aggregator wherever there is a transfer configuration.
            if moves_nothing(connector) and not getattr(self, "has_connector", False):
                return None
            return original(self, connector, *args, **kwargs)

        return init_kv_output_aggregator

    patch(Executor, "init_kv_output_aggregator", spared)


def moves_nothing(connector: Any) -> bool:
    """Return whether ``connector`` is ours and has no worker part."""
    from .connector import KvGraphConnector

    return isinstance(connector, KvGraphConnector) and not connector.has_workers


def own_transfer_config(
    endpoint: str, tiers: TierSettings | None = None, ends: str = "", layers: str = ""
) -> KVTransferConfig:
    """Return a transfer configuration with our connector. ``ends`` and ``layers`` are an
    ``EndMarks.text`` and a ``BorderTable.text``, or empty if unknown.
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


# Observes an engine whose user has configured another KV connector, which works as in stock vLLM.
#
# Its configuration, workers and class are not touched. Only the scheduler's instance gets a class
# of its own, whose methods call the user's first, with the same arguments, and then ours.

# Calls of the scheduler to a connector that ours needs too.
FOLLOWED: Final = (
    "bind_kv_cache_manager", "on_new_request", "get_num_new_matched_tokens",
    "update_state_after_alloc", "build_connector_meta", "request_finished",
    "request_finished_all_groups", "shutdown",
)  # fmt: skip
WATCH: Final = "_kvgraph_watch"


def follow_connectors() -> None:
    """Observe every connector that vLLM's factory makes for a scheduler from now on."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    def look(connector: Any, *_: Any, **__: Any) -> None:
        observe(connector)

    lost = "the user's connector runs as in stock vLLM, and is not observed"
    after(KVConnectorFactory, "create_connector", look, lost)


def observe(connector: KVConnectorBase_V1) -> None:
    """Let our connector follow the scheduler's ``connector``, if there is a sidecar."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from .connector import KvGraphConnector

    endpoint = engine_settings().sidecar
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
    """Return a subclass of ``base`` with the same name, whose followed methods also call ours."""
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


def follow_schedulers() -> None:
    """Make every scheduler created from now on hold new sessions, if that is configured."""
    if not engine_settings("admission").admission:
        return
    from vllm.v1.core.sched.scheduler import Scheduler

    def bind(_: None, scheduler: Scheduler, *args: Any, **kwargs: Any) -> None:
        bind_scheduler(scheduler)

    lost = "no admission in this engine, new sessions are never held"
    after(Scheduler, "__init__", bind, lost)


def bind_scheduler(scheduler: Scheduler) -> None:
    """Give ``scheduler`` to our connector: its own, or the one that follows its user's. Raises
    TypeError.
    """
    from .connector import KvGraphConnector

    if problems := live_misfits(Part.ADMISSION):
        raise TypeError("; ".join(problems))
    connector = scheduler.connector
    ours = connector if isinstance(connector, KvGraphConnector) else getattr(connector, WATCH, None)
    if ours is None:
        return
    if not type(scheduler).__module__.startswith("vllm."):
        raise TypeError(f"{type(scheduler).__qualname__} is not one of vLLM's own schedulers")
    ours.bind_scheduler(scheduler)


# The chat template that a server is given on its command line, instead of its model's.
#
# vLLM does not keep it in the engine's configuration, from which we start.

_GIVEN: Final = "_kvgraph_chat_template"


def remember_templates() -> None:
    """Record from now on the chat template that each engine is given with its arguments."""
    from vllm.engine.arg_utils import EngineArgs

    def remember(engine_args: Any, _: type, args: Any) -> None:
        setattr(engine_args, _GIVEN, getattr(args, "chat_template", None))

    after(EngineArgs, "from_cli_args", remember, "the server's chat template is not known")


def given_template(engine_args: object) -> str | None:
    """Return the chat template recorded for these arguments: a file's content, or text."""
    given = getattr(engine_args, _GIVEN, None)
    if given is None:
        return None
    try:
        return Path(given).read_text("utf-8")
    except (OSError, ValueError):  # it is no file: vLLM takes it for the template itself
        return str(given)
