"""How much memory and disk an engine may use for blocks that left its pool."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from ...graph.errors import ConfigError
from ..store.store_settings import STORE_VARIABLE, StoreSettings, read_store_settings
from ..variables import read_choice, read_gib

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
