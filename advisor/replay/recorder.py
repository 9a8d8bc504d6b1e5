"""``Recorder`` writes what a live engine does as a trace; ``RawLog`` writes every event as JSON.

A trace holds no token and no name: a block is a keyed hash of the engine's own block hash, a
session or a tenant a keyed hash of its name, and the key is forgotten with the recording.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from ...graph.types import LAYER_NAMES, as_keys
from ...graph.wire.events import (
    KINDS,
    AnyEvent,
    BlocksAttended,
    BlocksEmbedded,
    EngineHello,
    Event,
    RequestFinished,
    RequestStarted,
    Segment,
)
from .reader import HEADER_VERSION, new_file, read_lines
from .trace import TraceError

logger = logging.getLogger(__name__)

_MAX_RUNNING: Final = 65_536  # requests; chosen


class EventFile(ABC):
    """A file that is written of a sidecar's events; a full disk ends it.

    Args:
        path: The file to write, gzipped if it ends in ``.gz``; must not exist.
        clock: Monotonic seconds.

    Raises:
        TraceError: The file exists or cannot be written.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.written = 0  # requests or events
        self.failed = False
        self._clock = clock
        self._began = clock()
        self._path = path
        self._file = new_file(path)

    def __call__(self, engine: str, events: Sequence[AnyEvent]) -> None:
        """Take an engine's latest events."""
        now = self._clock() - self._began
        try:
            for event in events if not self.failed else ():
                self._take(engine, event, now)
        except OSError as error:
            self.failed = True
            logger.error("the log ends here: %s: %s", self._path, error.strerror)

    def close(self) -> None:
        """Finish the file."""
        try:
            self._file.close()
        except OSError as error:
            self.failed = True
            logger.error("the log is cut short: %s: %s", self._path, error.strerror)

    @abstractmethod
    def _take(self, engine: str, event: AnyEvent, now: float) -> None: ...


class Recorder(EventFile):
    """Writes one line per finished request, of a sidecar's events.

    Args:
        secret: The key of the hashes.
    """

    def __init__(
        self,
        path: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
        secret: bytes | None = None,
    ) -> None:
        super().__init__(path, clock=clock)
        self._secret = secret or secrets.token_bytes(32)
        self._running: dict[tuple[str, str], tuple[float, RequestStarted]] = {}
        self._block_size: int | None = None

    def _take(self, engine: str, event: AnyEvent, now: float) -> None:
        if isinstance(event, RequestStarted):
            self._started(engine, event, now)
        elif isinstance(event, RequestFinished):
            self._finished(engine, event, now)

    def _started(self, engine: str, event: RequestStarted, now: float) -> None:
        if len(self._running) >= _MAX_RUNNING:  # requests whose end was never received
            del self._running[next(iter(self._running))]
        self._running[engine, event.request_id] = (now, event)

    def _finished(self, engine: str, event: RequestFinished, now: float) -> None:
        at, started = self._running.pop((engine, event.request_id), (0.0, None))
        if started is None or started.prompt_tokens < 1 or not self._fits(started.block_size):
            return
        line = {
            "at": round(at, 6),
            "seconds": round(now - at, 6),
            "input_length": started.prompt_tokens,
            "output_length": event.total_tokens - started.prompt_tokens,
            "cached_tokens": started.cached_tokens,
            "session": self._name(event.tenant, event.session),
            "ended": event.session_ended,
            **self._said(started, event),
            "hash_ids": self._hashed(started.hashes),
            "output_hash_ids": self._hashed(event.hashes[len(started.hashes) :]),
        }
        self._write(line)
        self.written += 1

    def _said(self, started: RequestStarted, event: RequestFinished) -> dict[str, Any]:
        """Return what the caller stated besides the session; unknown fields are absent."""
        said = {
            "tenant": event.tenant and self._digest(f"\0\0{event.tenant}".encode()).hex(),
            "waiting_for_tool": event.waiting_for_tool,
            "expected_return_s": event.expected_return_s,
            "layers": [_part(segment, started) for segment in started.segments] or None,
        }
        return {name: value for name, value in said.items() if value is not None}

    def _fits(self, block_size: int) -> bool:
        """Tell whether blocks of this size belong into the file; the first request decides."""
        if self._block_size is None:
            self._block_size = block_size
            self._write({"kvgraph_trace": HEADER_VERSION, "block_size": block_size})
        return self._block_size == block_size

    def _hashed(self, hashes: bytes) -> list[int]:
        return [
            int.from_bytes(self._digest(hashes[i : i + 8]), "little")
            for i in range(0, len(hashes) - 7, 8)
        ]

    def _name(self, tenant: str | None, session: str | None) -> str | None:
        if session is None:
            return None
        return self._digest(f"{tenant or ''}\0{session}".encode("utf-8", "replace")).hex()

    def _digest(self, data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=8, key=self._secret).digest()

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(msgspec.json.encode(line).decode() + "\n")


def _part(segment: Segment, started: RequestStarted) -> tuple[str, int, int]:
    """Return a source layer and its range of prompt tokens."""
    end = min(segment.end, started.prompt_tokens)
    return LAYER_NAMES[segment.layer], min(segment.start, end), end


# Unlike a trace, a raw log keeps keys and names as engines report them. It has no prompt text and
# no token id, since no event has any.

PACKED: Final = ("hashes", "contents")  # fields of eight bytes each, one after the other
_LEFT_OUT: Final = (BlocksAttended, BlocksEmbedded)  # numbers of every step, and no fact of a block


class RawLog(EventFile):
    """Writes a line for each event of a sidecar: ``{"at", "engine", "event", …fields}``.

    ``at`` is in seconds since the log began, ``engine`` is an engine's id (its name is in its
    hello, as ``name``), ``hashes`` and ``contents`` are lists of ``0x…`` in chain order.
    """

    def _take(self, engine: str, event: AnyEvent, now: float) -> None:
        if not isinstance(event, _LEFT_OUT):
            line = {"at": round(now, 6), "engine": engine, **_worded(event)}
            self._file.write(json.dumps(line) + "\n")
            self.written += 1


def _worded(event: AnyEvent) -> dict[str, Any]:
    fields = msgspec.to_builtins(msgspec.structs.asdict(event), builtin_types=(bytes,))
    if isinstance(event, EngineHello):
        fields["name"] = fields.pop("engine")
    for name in PACKED:
        if isinstance(packed := fields.get(name), bytes):
            whole = packed[: len(packed) // 8 * 8]
            fields[name] = [f"{key:#018x}" for key in as_keys(whole).tolist()]
    return {"event": type(event).__name__, **fields}


_WRONG: Final = (
    ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError,
    msgspec.MsgspecError,
)  # fmt: skip
_LONGEST_S: Final = 1e9  # of a log; chosen: thirty years
_KINDS: Final = {kind.__name__: kind for kind in KINDS.values()}


class RawBatch(NamedTuple):
    """The events that one engine reported together; ``at`` is in seconds since the log began."""

    at: float
    engine: str
    events: list[AnyEvent]


def read_raw_log(path: Path) -> Iterator[RawBatch]:
    """Yield engines' events in their order; kinds of a newer version are left out.

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
    """Return an event within the wire's bounds; raises one of ``_WRONG``."""
    if kind is EngineHello:
        fields["engine"] = fields.pop("name")
    for name in PACKED:
        if isinstance(keys := fields.get(name), list):
            fields[name] = np.array([int(key, 16) for key in keys], dtype="<u8").tobytes()
    tag, known = kind.__struct_config__.tag, takewhile(fields.__contains__, kind.__struct_fields__)
    return msgspec.convert([tag, *(fields[name] for name in known)], kind)
