"""``stretch_of``: the recording, or the stretch of time, that a person named."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from ...graph.errors import ConfigError
from ...graph.logs.history import WINDOW_S
from ..happened.happened import Happened
from ..happened.origins import origin_of

_MOMENT: Final = r"now|\d+(?:\.\d+)?[smh]?"
_STRETCH: Final = re.compile(rf"(?:(?P<origin>.+)@)?(?P<begin>{_MOMENT})\.\.(?P<end>{_MOMENT})")
_UNITS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}
_ALLOWED: Final = (
    "allowed: a file, a URL, 2h..1h (ago, at the running sidecar), or one of them with such a "
    "stretch behind it: FILE@0m..30m counts from the file's beginning"
)


class _Named(NamedTuple):
    """What was named; times are seconds, as they stand there."""

    origin: str | None
    begin: float | None = None
    end: float | None = None


class Stretches:
    """Reads each origin once, however many stretches of it are named.

    Args:
        url: The sidecar that stretches without an origin are of; None: the one that runs.
    """

    def __init__(self, url: str | None) -> None:
        self._url = url
        self._read: dict[str | None, Happened] = {}

    def of(self, name: str) -> Happened:
        """What happened in what is named so.

        Raises:
            KvGraphError: It cannot be read, or is no name of any.
        """
        named = _parsed(name)
        whole = self._whole(named.origin)
        if named.begin is None or named.end is None:
            return whole
        times = (whole.end - named.begin, whole.end - named.end)
        begin, end = times if whole.is_live else (named.begin, named.end)
        if begin >= end:
            raise ConfigError(f"{name!r} is empty or runs backwards; {_ALLOWED}")
        cut = whole.between(begin, end, name)
        for text in _limits(name, whole, begin, end):
            cut = cut.knowing_less(text)
        return cut

    def _whole(self, origin: str | None) -> Happened:
        origin = origin or self._url
        if origin not in self._read:
            self._read[origin] = origin_of(origin).happened()
        return self._read[origin]


def _parsed(name: str) -> _Named:
    found = _STRETCH.fullmatch(name)
    if found is None:
        return _Named(name)
    return _Named(found["origin"], _seconds(found["begin"]), _seconds(found["end"]))


def _seconds(moment: str) -> float:
    if moment == "now":
        return 0.0
    unit = moment[-1] if moment[-1] in "smh" else ""
    return float(moment.removesuffix(unit)) * _UNITS[unit]


def _limits(name: str, whole: Happened, begin: float, end: float) -> Iterator[str]:
    """What a stretch of ``whole`` cannot tell, in sentences."""
    if begin < min((whole.begin, *(each.at for each in whole.minutes[:1]))):
        yield f"{name} begins before what is known: only a part of it is here."
    if whole.evictions and end > whole.end - WINDOW_S:
        yield (
            f"Of blocks that left at the end of {name} it is not known yet whether they are wanted "
            f"again within {WINDOW_S / 60:.0f} minutes."
        )
