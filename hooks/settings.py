"""``EngineSettings``: what the environment sets for an engine.

vLLM imports this module even if kvgraph is off. So it imports nothing of kvgraph, and of other
packages only pydantic, which vLLM has loaded already (pydantic-settings takes another 0.2 s).
"""

from __future__ import annotations

import difflib
import functools
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError

logger = logging.getLogger(__name__)

PREFIX: Final = "AITHER_KVCACHE_"
SWITCH_VARIABLE: Final = PREFIX + "GRAPH"
SIDECAR_VARIABLE: Final = PREFIX + "SIDECAR"
CHILD_VARIABLE: Final = PREFIX + "CHILD"
ENDS_VARIABLE: Final = PREFIX + "ENDS"
LAYERS_VARIABLE: Final = PREFIX + "LAYERS"
SECTIONS_VARIABLE: Final = PREFIX + "SECTIONS"
HINTS_VARIABLE: Final = PREFIX + "HINTS"
ADMISSION_VARIABLE: Final = PREFIX + "ADMISSION"
HOLD_MAX_VARIABLE: Final = PREFIX + "HOLD_MAX_S"
REFUSE_AFTER_VARIABLE: Final = PREFIX + "REFUSE_AFTER_S"
PROTECT_STALE_VARIABLE: Final = PREFIX + "PROTECT_STALE_S"
SAMPLING_VARIABLE: Final = PREFIX + "SAMPLING"
RECALL_VARIABLE: Final = PREFIX + "RECALL"
RECALL_SHARED_VARIABLE: Final = PREFIX + "RECALL_SHARED"
WARM_VARIABLE: Final = PREFIX + "WARM_GIB"
COLD_VARIABLE: Final = PREFIX + "COLD_GIB"
DIRECTORY_VARIABLE: Final = PREFIX + "COLD_DIR"
STORE_VARIABLE: Final = PREFIX + "STORE"
STORE_GIB_VARIABLE: Final = PREFIX + "STORE_GIB"
STORE_OPEN_VARIABLE: Final = PREFIX + "STORE_OPEN"

ENDPOINT_KEY: Final = "kvgraph_endpoint"  # in the connector's extra config
TIERS_KEY: Final = "kvgraph_tiers"
ENDS_KEY: Final = "kvgraph_ends"
LAYERS_KEY: Final = "kvgraph_layers"
CONNECTOR: Final = "KvGraphConnector"
CONNECTOR_MODULE: Final = "kvgraph.hooks.vllm.connector"
PLUGIN_GROUP: Final = "vllm.general_plugins"

FILE_PREFIX: Final = "kvgraph-"  # beginning of the names of a disk tier's files
DISK_SUFFIX: Final = ".tier"
MOONCAKE: Final = "mooncake://"

ON: Final = ("1", "true", "on", "yes")
OFF: Final = ("0", "false", "off", "no")
CORE_VARIABLE: Final = "AITHER_KVCACHE_CORE"
"""``python``: the hooks run in Python though there is a compiled core."""
PYTHON: Final = "python"
PROTECT_STALE_S: Final = 60.0
"""Chosen: longer than a sidecar takes to be started again with its snapshot, and so short that a
dead one does not shape the queue for long."""
SAMPLING_SHARE: Final = 0.002
"""Chosen: with all else that is on, sampled decode steps stay within half a percent of a step."""
RESERVED_CPUS_VARIABLE: Final = "VLLM_CPU_NUM_OF_RESERVED_CPU"  # vLLM's own
RUST_FRONTEND_VARIABLE: Final = "VLLM_USE_RUST_FRONTEND"  # vLLM's own
WITHOUT_API: Final = (
    f"vLLM's Rust frontend ({RUST_FRONTEND_VARIABLE}) has no API process of Python's: hints about "
    "messages are not read, chats are told apart by their tokens alone, and no request that waits "
    "too long is refused; all that the engine does itself goes on, other hints count"
)

_GIB: Final = 1 << 30
_MOST_GIB: Final = 1 << 20  # a pebibyte; chosen
_LONGEST_S: Final = 3600  # chosen
_SWITCHES: Final = frozenset({"graph", "admission", "layers", "sampling"})
"""Fields in which an invalid value counts as 1: whoever sets a switch does not want it off. Left
out are those that make answers approximate, or share more.
"""


def _share(text: str) -> str | float:
    return SAMPLING_SHARE if text.lower() in ON else 0.0 if text.lower() in OFF else text


_Switch = Annotated[bool, Field(description="1 or 0")]
_Seconds = Annotated[
    float,
    Field(ge=0, le=_LONGEST_S, allow_inf_nan=False, description=f"seconds from 0 to {_LONGEST_S}"),
]
_Gib = Annotated[
    float, Field(ge=0, le=_MOST_GIB, allow_inf_nan=False, description=f"GiB from 0 to {_MOST_GIB}")
]
_Lower = BeforeValidator(str.lower)


class EngineSettings(BaseModel):
    """The settings of an engine: field ``hold_max_s`` is variable ``AITHER_KVCACHE_HOLD_MAX_S``.

    An invalid value leaves the field at its default, or a switch at 1. The error is kept for code
    that uses the field: some of it refuses a part of its work, some warns and continues. A field's
    description states what is allowed.
    """

    model_config = ConfigDict(frozen=True, defer_build=True)

    graph: _Switch = False
    sidecar: str = ""
    child: str = ""  # endpoint of the sidecar if an engine started it
    hints: str = Field(
        "session",
        pattern="^((?i:all|session|off)$|secret:)",
        description="all, session, off, or secret:FILE",
    )
    core: Annotated[Literal["", "python"], _Lower] = Field("", description=PYTHON)
    # JSON: tokens that end answers; 0: off. If unset, they are learned from the chat template.
    ends: str = ""
    # 0: the layers of prompts are not found, and hints about messages are ignored. Beside a user's
    # own connector, our processes pass message borders in it.
    layers: str = Field("1", pattern=f"^((?i:{'|'.join(ON + OFF)})$|\\{{)", description="1 or 0")
    sections: str = ""  # a JSON object: lines that begin sections of a system text, their layers
    # Requests are held only while the sidecar measures that the engine thrashes and prompts queue.
    admission: _Switch = True
    hold_max_s: _Seconds = 300.0  # ``graph.wire.advice.HOLD_MAX_S``
    refuse_after_s: _Seconds = 60.0  # chosen
    protect_stale_s: _Seconds = PROTECT_STALE_S
    # Share of a worker's CPU time (on a GPU, of its decode steps) that attention sampling may take.
    sampling: Annotated[
        float, BeforeValidator(_share), Field(ge=0, lt=1, description="1, 0, or a share between")
    ] = 0.0
    # Off by default, even after a typo: answers become approximate only for callers that ask for
    # it.
    recall: bool | None = Field(
        None, description="1 (all requests), 0 (none), or unset (those that ask)"
    )
    recall_always: _Switch = False  # even if computing is faster, to try recall on a small model
    # Whether requests without tenant and salt may use each other's text. Off by default: loaded
    # text was computed behind the rest of its own prompt, so answers depend on that prompt.
    recall_shared: _Switch = False
    warm_gib: _Gib = 0.0
    cold_gib: _Gib = 0.0
    cold_dir: str = ""
    prefetch: _Switch = True
    spill: Annotated[Literal["worth", "all"], _Lower] = Field("worth", description="worth, all")
    store: str = ""  # a directory that engines share, or mooncake://HOST:PORT, a Mooncake master
    store_gib: _Gib = 0.0
    store_at: Annotated[Literal["turn", "eviction"], _Lower] = Field(
        "turn", description="turn, eviction"
    )
    store_salted: _Switch = False
    # The operator accepts that Mooncake's clients listen on all interfaces, without a password.
    store_open: _Switch = False

    _wrong: dict[str, str] = PrivateAttr(default_factory=dict)

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> EngineSettings:
        """Return the settings of an environment; the same object for equal environments."""
        texts = ((name, environment.get(PREFIX + name.upper(), "")) for name in cls.model_fields)
        return _settings(tuple((name, text.strip()) for name, text in texts if text.strip()))

    def complaint(self, *names: str) -> str:
        """Describe the first of these variables that is invalid; empty if none is."""
        return next((self._wrong[name] for name in names if name in self._wrong), "")

    def require(self, *names: str) -> None:
        """Raise ConfigError if one of these variables is invalid."""
        if complaint := self.complaint(*names):
            raise _config_error(complaint)

    @property
    def reads_ends(self) -> bool:
        return self.ends.lower() not in OFF

    @property
    def reads_layers(self) -> bool:
        """Whether the layers of prompts are found by the borders of their messages."""
        return self.layers.lower() not in OFF

    def tiers(self) -> TierSettings | None:
        """Return the configured tiers, or None without any. Raises ConfigError."""
        self.require("warm_gib", "cold_gib")
        store = self.shared_store()
        if store is not None and not self.warm_gib:
            raise _config_error(
                f"{STORE_VARIABLE} needs {WARM_VARIABLE}: blocks reach it by memory"
            )
        if self.cold_gib and not self.warm_gib:
            needs = f"{COLD_VARIABLE} needs {WARM_VARIABLE}"
            raise _config_error(f"{needs}: blocks reach the disk by memory")
        if bool(self.cold_gib) != bool(self.cold_dir):
            both = f"{COLD_VARIABLE} and {DIRECTORY_VARIABLE}"
            raise _config_error(f"{both} go together; one is missing")
        if not self.warm_gib:
            return None
        self.require("prefetch", "spill")
        return TierSettings(
            int(self.warm_gib * _GIB),
            int(self.cold_gib * _GIB),
            Path(self.cold_dir) if self.cold_dir else None,
            self.prefetch,
            self.spill == "all",
            store=store,
        )

    def shared_store(self) -> StoreSettings | None:
        """Return the configured shared store, or None without one. Raises ConfigError."""
        self.require("store_gib", "store_at", "store_salted", "store_open")
        if not self.store:
            return None
        if not self.store_gib:
            needs = f"{STORE_VARIABLE} needs {STORE_GIB_VARIABLE}"
            raise _config_error(f"{needs}: how much it may hold")
        size, salted = int(self.store_gib * _GIB), self.store_salted
        store = StoreSettings(self.store, size, self.store_at == "turn", salted)
        if store.is_mooncake and not self.store_open:
            raise _config_error(
                f"{STORE_VARIABLE}={self.store!r}: Mooncake's clients listen on all interfaces, "
                "without a password; if only engines can reach them, "
                f"{STORE_OPEN_VARIABLE}=1 allows it"
            )
        if not store.is_mooncake and not Path(self.store).is_absolute():
            allowed = f"an absolute path, or {MOONCAKE}HOST:PORT"
            raise _config_error(f"{STORE_VARIABLE}={self.store!r}; allowed: {allowed}")
        return store


@functools.lru_cache(maxsize=16)
def _settings(texts: tuple[tuple[str, str], ...]) -> EngineSettings:
    stated: dict[str, Any] = dict(texts)
    try:
        return EngineSettings(**stated)
    except ValidationError as error:
        wrong = {str(each["loc"][0]): "" for each in error.errors()}
    for name in wrong:
        text, allowed = stated.pop(name), EngineSettings.model_fields[name].description
        taken = ""
        if name in _SWITCHES:
            stated[name], taken = "1", " counts as 1"
        wrong[name] = f"{PREFIX}{name.upper()}={text[:80]!r}{taken}; allowed: {allowed}"
    settings = EngineSettings(**stated)
    settings._wrong.update(wrong)
    return settings


def engine_settings(*used: str) -> EngineSettings:
    """Read the settings from this process's environment; never raises. An invalid variable counts
    as its default, and is logged if it is among the fields in ``used``.
    """
    settings = EngineSettings.read(os.environ)
    for complaint in filter(None, map(settings.complaint, used)):
        taken = "" if "counts as" in complaint else "; its default is taken"
        logger.warning("kvgraph: %s%s", complaint, taken)
    return settings


_READ_ELSEWHERE: Final = (
    "SIDECAR_TOKEN", "SIDECAR_KEYS", "CALIBRATIONS", "KERNELS", "KERNEL_CACHE"
)  # fmt: skip


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Name each variable with our prefix that nothing reads, with the most similar one."""
    known = [*map(str.upper, EngineSettings.model_fields), *_READ_ELSEWHERE]
    told = []
    for name in sorted(environment):
        own = name.removeprefix(PREFIX)  # a prefix that all have would make all similar
        if own != name and own not in known:
            close = difflib.get_close_matches(own, known, n=1)
            told.append(f"{name} (did you mean {PREFIX}{close[0]}?)" if close else name)
    return told


def switched_on() -> bool:
    """Return whether the environment switches kvgraph on."""
    return bool(os.environ.get(SWITCH_VARIABLE)) and engine_settings().graph


def has_python_api() -> bool:
    """Return whether requests pass vLLM's Python API server, in which parts of kvgraph run."""
    return os.environ.get(RUST_FRONTEND_VARIABLE, "").strip().lower() in ("", *OFF)


def _config_error(text: str) -> ValueError:
    from ..graph.errors import ConfigError  # not above: switched off, nothing of ours is loaded

    return ConfigError(text)


@dataclass(frozen=True, slots=True)
class StoreSettings:
    place: str  # a directory's path, or ``mooncake://HOST:PORT``
    capacity_bytes: int  # of a directory in all; with Mooncake, what each worker adds
    # Whether blocks are stored when their request ends, or else when they are about to be evicted.
    at_turn_end: bool = True
    salted: bool = False  # whether blocks of requests with a cache salt are stored too

    @property
    def is_mooncake(self) -> bool:
        return self.place.startswith(MOONCAKE)


@dataclass(frozen=True, slots=True)
class TierSettings:
    warm_bytes: int  # bytes of host memory for copies
    cold_bytes: int = 0  # bytes of disk below that memory; 0 for none
    cold_dir: Path | None = None  # directory of the disk tier's files; None without one
    prefetch: bool = True  # whether copies are loaded before any request asks
    # A plain LRU memory: every block that is about to be evicted is copied, and the least recently
    # used copy makes room, whatever the graph knows of them.
    spill_all: bool = False
    sharers: int = 1  # workers on this machine, each with a budget of this size
    store: StoreSettings | None = None  # the shared store below that memory; None without one

    @property
    def keeps_more(self) -> bool:
        """Whether workers may find blocks when they start: on their disks, or in a store."""
        return self.cold_bytes > 0 or self.store is not None

    def plain(self) -> dict[str, Any]:
        """Return the settings as numbers and strings, for an engine's configuration."""
        return asdict(self) | {"cold_dir": str(self.cold_dir) if self.cold_dir else None}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> TierSettings:
        directory, store = plain["cold_dir"], plain["store"]
        made = {
            "cold_dir": Path(directory) if directory else None,
            "store": StoreSettings(**store) if store else None,
        }
        return cls(**{**plain, **made})
