"""Environment variables whose values have a form, read with errors that name what is allowed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ..graph.errors import ConfigError

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
