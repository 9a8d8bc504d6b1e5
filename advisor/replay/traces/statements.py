"""What callers said about a trace's requests."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from ....graph.types import LAYER_BY_NAME, LAYER_NAMES
from ..errors import TraceError
from .formats import Line
from .trace import NOBODY, Layers, Said


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
        self._waiting.append(NOBODY if waiting is None else waiting)
        self._expected.append(float("nan") if expected is None else expected)
        self._seconds.append(float("nan") if seconds is None else seconds)
        name = line.tenant
        self._tenant.append(
            NOBODY if name is None else self._tenants.setdefault(name, len(self._tenants))
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
