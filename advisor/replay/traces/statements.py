"""What callers said about a trace's requests."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ....graph.types import LAYER_BY_NAME, LAYER_NAMES, SourceLayer
from ..errors import TraceError
from .formats import Line

Layers = tuple[tuple[SourceLayer, int, int], ...]
"""Parts of a prompt: ``(source layer, first token, end token)``."""

_NOBODY = -1


@dataclass(frozen=True, slots=True, eq=False)
class Said:
    """A row a request, in order of arrival.

    Attributes:
        ended: bool, that the session is over with it.
        waiting: int8, why its answer ended: 1 in a tool call, 0 the turn, -1 nobody said.
        expected_return_s: float64, seconds from its end to the session's next; NaN: nobody said.
        seconds: float64, how long it took; NaN: nobody knows.
        layers: The parts of its prompt.
        tenant: int32, numbered; -1 where none was named.
    """

    ended: npt.NDArray[np.bool_]
    waiting: npt.NDArray[np.int8]
    expected_return_s: npt.NDArray[np.float64]
    seconds: npt.NDArray[np.float64]
    layers: tuple[Layers, ...]
    tenant: npt.NDArray[np.int32]

    @property
    def anything(self) -> bool:
        """Whether any caller said what a session is doing, or what its prompt consists of."""
        told = (self.ended, ~np.isnan(self.expected_return_s))
        return self.tells_stops or any(bool(c.any()) for c in told) or any(self.layers)

    @property
    def tells_stops(self) -> bool:
        """Whether it is known of any answer why it ended."""
        return bool((self.waiting != _NOBODY).any())

    def rows(self, part: slice) -> Said:
        """The statements of some of the requests."""
        return Said(
            self.ended[part],
            self.waiting[part],
            self.expected_return_s[part],
            self.seconds[part],
            self.layers[part],
            self.tenant[part],
        )


class SaidDraft:
    """Callers' statements while a trace is read."""

    def __init__(self) -> None:
        self._ended, self._waiting = array("b"), array("b")
        self._expected, self._seconds = array("d"), array("d")
        self._layers: list[Layers] = []
        self._known: dict[Layers, Layers] = {}  # equal parts are kept once
        self._tenant = array("i")
        self._tenants: dict[str, int] = {}

    def add(self, line: Line) -> None:
        """Take a request's line.

        Raises:
            TraceError: Names the field that means nothing.
        """
        layers = _layers(line)
        waiting, expected, seconds = line.waiting_for_tool, line.expected_return_s, line.seconds
        self._layers.append(self._known.setdefault(layers, layers))
        self._ended.append(line.ended or False)
        self._waiting.append(_NOBODY if waiting is None else waiting)
        self._expected.append(float("nan") if expected is None else expected)
        self._seconds.append(float("nan") if seconds is None else seconds)
        name = line.tenant
        self._tenant.append(
            _NOBODY if name is None else self._tenants.setdefault(name, len(self._tenants))
        )

    def said(self, order: Sequence[int]) -> Said:
        """All statements, with the requests in this order."""
        return Said(
            np.array(self._ended, dtype=np.bool_)[order],
            np.array(self._waiting, dtype=np.int8)[order],
            np.array(self._expected)[order],
            np.array(self._seconds)[order],
            tuple(self._layers[request] for request in order),
            np.array(self._tenant, dtype=np.int32)[order],
        )


def _layers(line: Line) -> Layers:
    layers = []
    for name, start, end in line.layers or ():
        if name not in LAYER_BY_NAME:
            raise TraceError(f"layers: {name!r}: allowed: {', '.join(LAYER_NAMES)}")
        if not start <= end <= (line.input_length or 0):
            raise TraceError(f"layers: tokens {start} to {end} of {line.input_length}")
        layers.append((LAYER_BY_NAME[name], start, end))
    return tuple(layers)
