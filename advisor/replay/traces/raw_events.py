"""Reads a raw log (``raw_log``) back into events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from ....graph.messages.events import KINDS, AnyEvent, EngineHello, Event
from ..errors import TraceError
from .lines import read_lines
from .raw_log import PACKED

_WRONG: Final = (
    ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError,
    msgspec.MsgspecError,
)  # fmt: skip
_LONGEST_S: Final = 1e9  # of a log; chosen: thirty years
_KINDS: Final = {kind.__name__: kind for kind in KINDS.values()}


class RawBatch(NamedTuple):
    """What one engine reported together; ``at`` is in seconds since the log began."""

    at: float
    engine: str
    events: list[AnyEvent]


def read_raw_log(path: Path) -> Iterator[RawBatch]:
    """Yield what engines reported, in its order; kinds of a newer build are left out.

    Raises:
        TraceError: Names the file, the line and what is wrong.
    """
    lines = (_checked(path, number, line) for number, line in read_lines(path))
    for (at, engine), together in groupby(lines, key=lambda line: line[:2]):
        yield RawBatch(at, engine, [event for *_, event in together if event is not None])


def _checked(path: Path, number: int, line: bytes) -> tuple[float, str, AnyEvent | None]:
    try:
        return _event(json.loads(line))
    except _WRONG as error:
        raise TraceError(
            f"{path}:{number}: not a line of a raw log ({type(error).__name__}: {error}); "
            "`kvgraph record --raw` writes those"
        ) from None


def _event(fields: dict[str, Any]) -> tuple[float, str, AnyEvent | None]:
    at, engine, name = float(fields.pop("at")), str(fields.pop("engine")), fields.pop("event")
    if not 0 <= at <= _LONGEST_S:  # which no NaN is
        raise ValueError(f"at {at:g} s")
    kind = _KINDS.get(name)
    return at, engine, None if kind is None else _typed(kind, fields)


def _typed(kind: type[Event], fields: dict[str, Any]) -> Any:
    """An event within the wire's bounds; raises one of ``_WRONG``."""
    if kind is EngineHello:
        fields["engine"] = fields.pop("name")
    for name in PACKED:
        if isinstance(keys := fields.get(name), list):
            fields[name] = np.array([int(key, 16) for key in keys], dtype="<u8").tobytes()
    tag, known = kind.__struct_config__.tag, takewhile(fields.__contains__, kind.__struct_fields__)
    return msgspec.convert([tag, *(fields[name] for name in known)], kind)
