"""The vLLM plugin: with ``AITHER_KVCACHE_GRAPH=1`` every engine gets our connector. vLLM loads it
in each of its processes, perhaps repeatedly, and does not catch what it raises: so ``register`` is
idempotent and never raises, and whatever goes wrong later leaves one warning and a stock engine.
"""

from __future__ import annotations

import importlib.metadata
import logging
import multiprocessing
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..settings import (
    CHILD_VARIABLE,
    ENDS_VARIABLE,
    LAYERS_VARIABLE,
    PLUGIN_GROUP,
    RESERVED_CPUS_VARIABLE,
    SIDECAR_VARIABLE,
    WITHOUT_API,
    engine_settings,
    has_python_api,
    switched_on,
    unknown_variables,
)
from ..threads import log_where_vllm_logs
from .patches import (
    follow_connectors,
    follow_schedulers,
    given_template,
    own_transfer_config,
    remember_templates,
    spare_aggregation,
)
from .patching import after, is_patched
from .sampled.attach import follow_runners
from .shapes import reason_for_no_tiers, reason_to_decline
from .versions import READ, WHAT_FITS, is_known, live_unknown_places

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from ..settings import TierSettings

logger = logging.getLogger(__name__)


def register() -> None:
    """Entry point ``vllm.general_plugins``: does nothing unless the switch is on."""
    if not switched_on():
        return
    for install in (
        _wrap_engine_config, remember_templates, follow_connectors, spare_aggregation,
        follow_schedulers, follow_runners, _mark_chats,
    ):  # fmt: skip
        try:
            install()
        except Exception as error:
            logger.warning(
                "kvgraph: could not be installed (%s: %s); the engine runs as stock vLLM",
                type(error).__name__, error,
            )  # fmt: skip
            return


def _wrap_engine_config() -> None:
    from vllm.engine.arg_utils import EngineArgs

    if is_patched(EngineArgs, "create_engine_config"):
        return
    _check_version()
    _check_rivals()
    _check_variables()
    _check_frontend()

    def attached(config: VllmConfig, engine_args: Any, *args: Any, **kwargs: Any) -> None:
        log_where_vllm_logs()  # only now has vLLM set up its own
        attach(config, given_template(engine_args))

    lost = "could not be attached to this engine, which runs as stock vLLM"
    after(EngineArgs, "create_engine_config", attached, lost)


def _mark_chats() -> None:
    if not engine_settings().reads_layers:
        return
    from .api.chats import mark_chats  # not above: switched off, nothing of ours is loaded

    try:
        mark_chats()
    except Exception as error:  # chats are then told apart by their tokens alone
        logger.warning("kvgraph: chats are not marked (%s: %s)", type(error).__name__, error)


def attach(config: VllmConfig, chat_template: str | None = None) -> None:
    """Let a sidecar, already running or started now, observe an engine with this configuration.

    An engine without a connector gets ours, after vLLM has resolved and checked the configuration,
    because those checks concern connectors that move KV. A user's own connector stays as it is, and
    is observed when the scheduler creates it (``patches.observe``).
    """
    # Not above: switched off, nothing of ours is loaded.
    from .api.learning import engine_borders, engine_marks

    if reason := reason_to_decline(config):
        logger.warning("kvgraph: not attached: %s", reason)
        return
    tiers, endpoint = tiers_asked_for(config), sidecar_endpoint()
    user, marks = config.kv_transfer_config, engine_marks(config, chat_template)
    borders = engine_borders(config, chat_template)
    if user is None or user.kv_connector is None:
        keep_cpu_threads(config)
        config.kv_transfer_config = own_transfer_config(endpoint, tiers, marks, borders)
        return
    handed = {ENDS_VARIABLE: marks, LAYERS_VARIABLE: borders}  # the user's configuration stays
    os.environ.update({name: text for name, text in handed.items() if text})


def tiers_asked_for(config: VllmConfig) -> TierSettings | None:
    """Return the tiers that the environment asks for; None if this engine cannot have them."""
    from ...graph.errors import ConfigError  # not above: switched off, nothing of ours is loaded

    try:
        tiers = engine_settings().tiers()
    except ConfigError as error:
        logger.warning("kvgraph: no tiers: %s", error)
        return None
    if tiers is None:
        return None
    if reason := reason_for_no_tiers(config):
        logger.warning("kvgraph: no tiers: %s", reason)
        return None
    # How many workers run here, for the engine and its local data-parallel peers.
    parallel = config.parallel_config
    workers = int(parallel.local_world_size) * int(parallel.data_parallel_size_local)
    return replace(tiers, sharers=max(1, workers))


def sidecar_endpoint() -> str:
    """Return the endpoint of the running sidecar, or of a child started now."""
    endpoint = engine_settings().sidecar
    if endpoint and not _is_a_strangers_child(endpoint):
        return _checked(endpoint)
    from ..sidecar import start_child

    endpoint = start_child()
    os.environ[SIDECAR_VARIABLE] = endpoint  # the engine's other processes inherit it
    os.environ[CHILD_VARIABLE] = f"{os.getpid()} {endpoint}"
    return endpoint


def _is_a_strangers_child(endpoint: str) -> bool:
    """Whether another program's engine started the sidecar at ``endpoint`` for itself.

    Whatever that program starts inherits its environment. An engine's own processes are made by
    ``multiprocessing``; any other program has to outlive the one that it was started by.
    """
    owner, _, child = engine_settings().child.partition(" ")
    inherited = multiprocessing.parent_process() is not None
    return child == endpoint and owner != str(os.getpid()) and not inherited


def _checked(endpoint: str) -> str:
    from ...graph.errors import ConfigError
    from ...graph.wire.endpoints import check_endpoint
    from ..access import engine_keys

    has_keys = not endpoint.startswith("ipc://") and engine_keys() is not None
    try:
        return check_endpoint(endpoint, any_host=has_keys, connects=True)
    except ValueError as error:
        raise ConfigError(f"{SIDECAR_VARIABLE}={endpoint!r} {error}") from None


def keep_cpu_threads(config: VllmConfig) -> None:
    """Keep for a CPU engine the threads that it would have without us.

    With any transfer configuration, its workers leave one more core free for a transfer that we do
    not do (``vllm.utils.ompmultiprocessing``). On two cores none is left, and the workers' threads
    compete with the scheduler: half the throughput. A number set by the user stays.
    """
    from vllm.platforms import CpuArchEnum, current_platform

    if not current_platform.is_cpu() or RESERVED_CPUS_VARIABLE in os.environ:
        return
    alone = (CpuArchEnum.X86, CpuArchEnum.ARM, CpuArchEnum.RISCV)
    a_worker = current_platform.get_cpu_architecture() in alone
    stock = config.parallel_config.local_world_size if a_worker else 1
    os.environ[RESERVED_CPUS_VARIABLE] = str(stock)


def _check_version() -> None:
    import vllm

    if not is_known(vllm.__version__):
        logger.warning(
            "kvgraph: %s, and this is %s; `kvgraph doctor` shows what it lacks",
            WHAT_FITS,
            vllm.__version__,
        )
    if vllm.__version__.partition("+")[0] not in READ and (places := live_unknown_places()):
        logger.warning(
            "kvgraph: this vLLM (%s) asks in places that we do not know whether there is a KV "
            "connector, and may run otherwise than without us there: %s",
            vllm.__version__,
            ", ".join(places[:8]) + (f" and {len(places) - 8} more" if len(places) > 8 else ""),
        )


def _check_frontend() -> None:
    if not has_python_api() and multiprocessing.parent_process() is None:
        logger.warning("kvgraph: %s", WITHOUT_API)


def _check_variables() -> None:
    unknown = unknown_variables(os.environ)
    if unknown and multiprocessing.parent_process() is None:
        logger.warning("kvgraph: nothing reads these environment variables: %s", ", ".join(unknown))


def _check_rivals() -> None:
    if rivals := rival_plugins():
        logger.warning(
            "kvgraph: the vLLM plugin %s answers to the same switch and evicts by itself; leave it "
            "out with VLLM_PLUGINS=kvgraph (and whatever other plugins you need)",
            ", ".join(rivals),
        )


def rival_plugins() -> list[str]:
    """Return other plugins that vLLM will load and that our switch enables too."""
    allowed = os.environ.get("VLLM_PLUGINS")
    return [
        plugin.name
        for plugin in importlib.metadata.entry_points(group=PLUGIN_GROUP)
        if plugin.value.startswith("aither_kvcache.")
        and (allowed is None or plugin.name in allowed.split(","))
    ]
