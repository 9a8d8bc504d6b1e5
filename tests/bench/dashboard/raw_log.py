"""A raw log: every event that engines report, as a line of JSON with keys and names."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from kvgraph.advisor.replay.reader import new_file
from kvgraph.graph.types import as_keys
from kvgraph.graph.wire.events import AnyEvent, BlocksAttended, BlocksEmbedded, EngineHello

_PACKED: Final = ("hashes", "contents")  # fields of eight bytes each, one after the other
_LEFT_OUT: Final = (BlocksAttended, BlocksEmbedded)  # numbers of every step, and no fact of a block


class RawLog:
    """Writes a line for each event of a sidecar: ``{"at", "engine", "event", …fields}``.

    ``at`` is in seconds since the log began, ``engine`` is an engine's id (its name is in its
    hello, as ``name``), ``hashes`` and ``contents`` are lists of ``0x…`` in chain order.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float]) -> None:
        self._clock, self._began, self._file = clock, clock(), new_file(path)
        self.close = self._file.close

    def __call__(self, engine: str, events: Sequence[AnyEvent]) -> None:
        at = round(self._clock() - self._began, 6)
        for event in events:
            if not isinstance(event, _LEFT_OUT):
                line = {"at": at, "engine": engine, **_worded(event)}
                self._file.write(json.dumps(line) + "\n")


def _worded(event: AnyEvent) -> dict[str, Any]:
    fields = msgspec.to_builtins(msgspec.structs.asdict(event), builtin_types=(bytes,))
    if isinstance(event, EngineHello):
        fields["name"] = fields.pop("engine")
    for name in _PACKED:
        if isinstance(packed := fields.get(name), bytes):
            whole = packed[: len(packed) // 8 * 8]
            fields[name] = [f"{key:#018x}" for key in as_keys(whole).tolist()]
    return {"event": type(event).__name__, **fields}
