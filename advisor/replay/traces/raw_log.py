"""Writes everything that engines report as lines of JSON, for checking a sidecar.

Unlike a trace (``recorder``) it keeps keys and names as engines report them. It has no prompt text
and no token id, since no event has any.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from ....graph.messages.events import AnyEvent, BlocksAttended, BlocksEmbedded, EngineHello
from ....graph.types import as_keys
from .lines import new_file

logger = logging.getLogger(__name__)

PACKED: Final = ("hashes", "contents")  # fields of eight bytes each, one after the other
_LEFT_OUT: Final = (BlocksAttended, BlocksEmbedded)  # numbers of every step, and no fact of a block


class RawLog:
    """Shown a sidecar's events, writes a line for each: ``{"at", "engine", "event", …fields}``.

    ``at`` is in seconds since the log began, ``engine`` is an engine's id (what it calls itself in
    its hello is ``name``), ``hashes`` and ``contents`` are lists of ``0x…`` in chain order.

    Args:
        path: The file to write, gzipped if it ends in ``.gz``; must not exist.
        clock: Monotonic seconds.

    Raises:
        TraceError: The file exists or cannot be written.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.events = 0
        self._clock = clock
        self._began = clock()
        self._failed = False
        self._path = path
        self._file = new_file(path)

    def __call__(self, engine: str, events: Sequence[AnyEvent]) -> None:
        """Write what an engine reported; a full disk ends the log."""
        now = round(self._clock() - self._began, 6)
        kept = [] if self._failed else [each for each in events if not isinstance(each, _LEFT_OUT)]
        try:
            for event in kept:
                line = {"at": now, "engine": engine, **_worded(event)}
                self._file.write(json.dumps(line) + "\n")
                self.events += 1
        except OSError as error:
            self._failed = True
            logger.error("the log ends here: %s: %s", self._path, error.strerror)

    def close(self) -> None:
        """Finish the file."""
        try:
            self._file.close()
        except OSError as error:
            logger.error("the log is cut short: %s: %s", self._path, error.strerror)


def _worded(event: AnyEvent) -> dict[str, Any]:
    fields = msgspec.to_builtins(msgspec.structs.asdict(event), builtin_types=(bytes,))
    if isinstance(event, EngineHello):
        fields["name"] = fields.pop("engine")
    for name in PACKED:
        if isinstance(packed := fields.get(name), bytes):
            whole = packed[: len(packed) // 8 * 8]
            fields[name] = [f"{key:#018x}" for key in as_keys(whole).tolist()]
    return {"event": type(event).__name__, **fields}
