"""The names and variables by which an engine is configured."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from ..graph.errors import ConfigError

# Environment variables whose values have a form, read with errors that name what is allowed.

_GIB: Final = 1 << 30
_MOST_GIB: Final = 1 << 20  # a pebibyte; chosen


def read_gib(environment: Mapping[str, str], name: str) -> int:
    """Return a variable's GiB in bytes; 0 where it is not set.

    Raises:
        ConfigError: It is no number, or too large.
    """
    text = environment.get(name, "").strip()
    try:
        value = float(text) if text else 0.0
    except ValueError:
        value = -1.0
    if not 0 <= value <= _MOST_GIB:  # which no NaN is
        raise ConfigError(f"{name}={text!r}; allowed: GiB from 0 to {_MOST_GIB}")
    return int(value * _GIB)


def read_choice(environment: Mapping[str, str], name: str, allowed: tuple[str, ...]) -> str:
    """Return a variable's value in lower case; the first of ``allowed`` where it is not set.

    Raises:
        ConfigError: It is none of ``allowed``.
    """
    value = environment.get(name, "").strip().lower() or allowed[0]
    if value not in allowed:
        raise ConfigError(f"{name}={value!r}; allowed: {', '.join(allowed)}")
    return value


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
CORE_VARIABLE: Final = "AITHER_KVCACHE_CORE"
"""``python``: the hooks run in Python though there is a compiled core."""
PYTHON: Final = "python"
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
    from ..graph.errors import ConfigError  # not above: switched off, nothing of ours is loaded

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
    from ..graph.errors import ConfigError  # as above

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


# What an environment asks of the shared store.

STORE_VARIABLE: Final = "AITHER_KVCACHE_STORE"
"""A directory that engines share, or ``mooncake://HOST:PORT``, a Mooncake master."""
STORE_GIB_VARIABLE: Final = "AITHER_KVCACHE_STORE_GIB"
STORE_AT_VARIABLE: Final = "AITHER_KVCACHE_STORE_AT"
STORE_SALTED_VARIABLE: Final = "AITHER_KVCACHE_STORE_SALTED"
STORE_OPEN_VARIABLE: Final = "AITHER_KVCACHE_STORE_OPEN"
"""1: the operator knows that Mooncake's clients listen on all interfaces, without a password."""

MOONCAKE: Final = "mooncake://"

TURN, EVICTION = "turn", "eviction"
_WHEN: Final = (TURN, EVICTION)
_SWITCH: Final = ("0", "1")


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """One store, and what may go there.

    Attributes:
        place: A directory's path, or ``mooncake://HOST:PORT``.
        capacity_bytes: Of a directory in all; of Mooncake's store what each worker adds to it.
        at_turn_end: Whether blocks go there when their request ends; else when they are about to be
            evicted.
        salted: Whether blocks of requests with a cache salt go there too.
    """

    place: str
    capacity_bytes: int
    at_turn_end: bool = True
    salted: bool = False

    @property
    def is_mooncake(self) -> bool:
        """Whether it is Mooncake's."""
        return self.place.startswith(MOONCAKE)


def read_store_settings(environment: Mapping[str, str]) -> StoreSettings | None:
    """Read what an environment asks for; None if it asks for no store.

    Raises:
        ConfigError: A variable's value is not allowed; the message names both.
    """
    place = environment.get(STORE_VARIABLE, "").strip()
    capacity = read_gib(environment, STORE_GIB_VARIABLE)
    when = read_choice(environment, STORE_AT_VARIABLE, _WHEN)
    salted = read_choice(environment, STORE_SALTED_VARIABLE, _SWITCH) == "1"
    is_open = read_choice(environment, STORE_OPEN_VARIABLE, _SWITCH) == "1"
    if not place:
        return None
    if not capacity:
        raise ConfigError(f"{STORE_VARIABLE} needs {STORE_GIB_VARIABLE}: how much it may hold")
    settings = StoreSettings(place, capacity, when == TURN, salted)
    if settings.is_mooncake and not is_open:
        raise ConfigError(
            f"{STORE_VARIABLE}={place!r}: Mooncake's clients listen on all interfaces, without a "
            f"password; if only engines can reach them, {STORE_OPEN_VARIABLE}=1 allows it"
        )
    if not settings.is_mooncake and not Path(place).is_absolute():
        allowed = f"an absolute path, or {MOONCAKE}HOST:PORT"
        raise ConfigError(f"{STORE_VARIABLE}={place!r}; allowed: {allowed}")
    return settings


# How much memory and disk an engine may use for blocks that left its pool.

WARM_VARIABLE: Final = "AITHER_KVCACHE_WARM_GIB"
COLD_VARIABLE: Final = "AITHER_KVCACHE_COLD_GIB"
DIRECTORY_VARIABLE: Final = "AITHER_KVCACHE_COLD_DIR"
PREFETCH_VARIABLE: Final = "AITHER_KVCACHE_PREFETCH"
SPILL_VARIABLE: Final = "AITHER_KVCACHE_SPILL"
FILE_PREFIX: Final = "kvgraph-"  # of a disk tier's files
DISK_SUFFIX: Final = ".tier"

_SPILL: Final = ("worth", "all")
_PREFETCH: Final = ("1", "0", "queued")


@dataclass(frozen=True, slots=True)
class TierSettings:
    """Budgets of one worker, and what may be done with them.

    Attributes:
        warm_bytes: Bytes of host memory for copies.
        cold_bytes: Bytes of disk below that memory; 0 for none.
        cold_dir: Where the disk tier's files live; None without one.
        prefetch: Whether copies are loaded before any request asks.
        ahead: Whether they are loaded for requests that wait in vLLM's queue, too.
        spill_all: A plain LRU memory: every block that is about to be evicted is copied, and the
            least recently used copy makes room, whatever the graph knows of them.
        sharers: Workers on this machine, each with a budget of this size.
        store: The shared store below that memory; None without one.
    """

    warm_bytes: int
    cold_bytes: int = 0
    cold_dir: Path | None = None
    prefetch: bool = True
    ahead: bool = False
    spill_all: bool = False
    sharers: int = 1
    store: StoreSettings | None = None

    @property
    def keeps_more(self) -> bool:
        """Whether workers may find blocks at their start: on their disks, or in a store."""
        return self.cold_bytes > 0 or self.store is not None

    def plain(self) -> dict[str, Any]:
        """Return the settings as numbers and strings, for an engine's configuration."""
        return asdict(self) | {"cold_dir": str(self.cold_dir) if self.cold_dir else None}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> TierSettings:
        """Return the settings that ``plain`` was made of."""
        directory, store = plain["cold_dir"], plain["store"]
        made = {
            "cold_dir": Path(directory) if directory else None,
            "store": StoreSettings(**store) if store else None,
        }
        return cls(**{**plain, **made})


def read_settings(environment: Mapping[str, str]) -> TierSettings | None:
    """Read the settings that an environment asks for; None if it asks for no tiers.

    Raises:
        ConfigError: A variable's value is not allowed; the message names both.
    """
    warm = read_gib(environment, WARM_VARIABLE)
    cold = read_gib(environment, COLD_VARIABLE)
    directory = environment.get(DIRECTORY_VARIABLE, "").strip()
    store = read_store_settings(environment)
    if store is not None and not warm:
        raise ConfigError(f"{STORE_VARIABLE} needs {WARM_VARIABLE}: blocks reach it by memory")
    if cold and not warm:
        raise ConfigError(f"{COLD_VARIABLE} needs {WARM_VARIABLE}: blocks reach the disk by memory")
    if bool(cold) != bool(directory):
        raise ConfigError(f"{COLD_VARIABLE} and {DIRECTORY_VARIABLE} go together; one is missing")
    if not warm:
        return None
    prefetch = read_choice(environment, PREFETCH_VARIABLE, _PREFETCH)
    return TierSettings(
        warm,
        cold,
        Path(directory) if directory else None,
        prefetch != "0",
        prefetch == "queued",
        read_choice(environment, SPILL_VARIABLE, _SPILL) == "all",
        store=store,
    )
