"""What values the fields of a hint may have.

Each of these reads one value, and raises ValueError or TypeError in words that go on a sentence
which names the field.
"""

from __future__ import annotations

from typing import Final

from ....graph.messages.fields import MAX_NAME
from ....graph.types import LAYER_BY_NAME, LAYER_NAMES

MAX_SECONDS: Final = 1e9  # of a stated return or a lease; chosen


def name_of(value: object) -> str:
    """A name, cut to ``MAX_NAME`` characters."""
    if not isinstance(value, str):
        raise TypeError("must be a string")
    # Lone surrogates cannot be encoded on the wire; they come in through JSON escapes.
    return value[:MAX_NAME].encode("utf-8", "replace").decode()


def flag_of(value: object) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise TypeError("must be true or false")
    return value


def seconds_of(value: object) -> float:
    """Seconds."""
    return _number(value, MAX_SECONDS)


def lease_of(value: object) -> float | None:
    """Seconds, or true: as long as a lease may last; None for false."""
    if isinstance(value, bool):
        return MAX_SECONDS if value else None
    if not isinstance(value, int | float) or not value >= 0:
        raise ValueError("must be true, or a number of seconds from 0")
    return float(min(value, MAX_SECONDS))


def importance_of(value: object) -> float:
    """A number from 0 to 1."""
    return _number(value, 1.0)


def _number(value: object, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise ValueError(f"must be a number from 0 to {most:g}")
    return float(value)


def token_of(value: object) -> int:
    """A token's position in a prompt."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 31:
        raise ValueError("must be a token position, an integer from 0")
    return value


def layer_of(value: object) -> int:
    """A source layer, by its name."""
    layer = LAYER_BY_NAME.get(value) if isinstance(value, str) else None
    if layer is None:
        raise ValueError(f"must be one of {', '.join(LAYER_NAMES)}")
    return int(layer)
