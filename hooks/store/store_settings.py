"""What an environment asks of the shared store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ...graph.errors import ConfigError
from ..variables import read_choice, read_gib

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
