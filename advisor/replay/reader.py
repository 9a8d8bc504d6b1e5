"""``load_trace``: reads a trace file of any known format into columns."""

from __future__ import annotations

import codecs
import gzip
import os
import re
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader, RawIOBase, TextIOWrapper
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final, TextIO, TypeVar, cast

import msgspec
import numpy as np
import numpy.typing as npt

from ...graph.ingest.sessions import SHARED, continued
from ...graph.types import LAYER_BY_NAME, LAYER_NAMES, NO_ROW
from ...graph.wire.events import MAX_SEGMENTS
from ..policies.hazard import Floats
from .trace import NOBODY, Ints, ServiceModel, Statements, Trace, TraceError, last_turns
from .trace import Layers as TraceLayers

Tokens = Annotated[int, msgspec.Meta(ge=0, le=1 << 30)]
Time = Annotated[float, msgspec.Meta(ge=0, le=1e13)]
BlockHash = Annotated[int, msgspec.Meta(ge=0)]  # up to 2**64 - 1: msgspec's own bound
Name = Annotated[str, msgspec.Meta(max_length=1024)]
Return = Annotated[float, msgspec.Meta(ge=0, le=1e9)]  # s; the bound of the wire
Layers = Annotated[list[tuple[Name, Tokens, Tokens]], msgspec.Meta(max_length=MAX_SEGMENTS)]


class Line(msgspec.Struct, omit_defaults=True):
    """One line of any format; absent fields are None."""

    # every format
    input_length: Tokens | None = None
    output_length: Tokens | None = None
    hash_ids: list[BlockHash] | None = None
    timestamp: Time | None = None  # ms; Qwen-Bailian: s
    # aiperf
    session_id: Name | int | None = None
    delay: Time | None = None  # ms after the end of the session's previous turn
    # Qwen-Bailian
    chat_id: int | None = None
    parent_chat_id: int | None = None
    turn: int | None = None
    # our own
    kvgraph_trace: int | None = None
    block_size: Annotated[int, msgspec.Meta(ge=1, le=65_535)] | None = None
    at: Time | None = None  # s since the recording began
    session: Name | None = None
    output_hash_ids: list[BlockHash] | None = None
    ended: bool | None = None
    cached_tokens: Tokens | None = None
    seconds: Time | None = None  # seconds that the request took
    # what a caller stated: absent if nothing was stated
    waiting_for_tool: bool | None = None  # true: the answer ended in a tool call; false: the turn
    expected_return_s: Return | None = None  # after the end of the request
    layers: Layers | None = None  # (source layer, first token, end token)
    tenant: Name | None = None


@dataclass(frozen=True, slots=True)
class Format:
    name: str
    block_size: int | None  # tokens per hash id; None if the header states it
    unit: float  # seconds per unit of ``timestamp``
    required: tuple[str, ...]  # fields that every line must have
    foreign: tuple[str, ...]  # fields that occur only in lines of another format
    # Whether each line has a time; sessions without time stamps proceed as their answers allow.
    timed: bool = True

    def check(self, line: Line) -> None:
        """Check that a line is of this format and complete; raises TraceError."""
        for name in self.foreign:
            if getattr(line, name) is not None:
                raise TraceError(
                    f"{name} does not belong into a {self.name} trace: one file holds one format"
                )
        for name in self.required:
            if getattr(line, name) is None:
                raise TraceError(f"{name} is missing; a {self.name} line needs it")
        timed = self.timed and line.session_id is None
        if timed and line.timestamp is None and line.at is None:
            raise TraceError(f"timestamp is missing; a {self.name} line needs it")


_SAID: Final = ("waiting_for_tool", "expected_return_s", "layers", "tenant")
_OURS: Final = ("kvgraph_trace", "block_size", "at", "session", *_SAID)
_BAILIAN: Final = ("chat_id", "parent_chat_id", "turn")
_AIPERF: Final = ("session_id", "delay")
_BODY: Final = ("input_length", "hash_ids")

# A new format needs its fields in ``Line``, a ``Format``, a branch of ``detect`` (and a word in its
# error), its own fields among the foreign ones of all others (otherwise a file that mixes two
# formats is read as one), and where its fields are other ones than ``timestamp`` and
# ``session_id``, a branch of ``_Draft._arrival`` and ``_Draft._session``. aiperf also reads
# mooncake traces, and lines without a session.
MOONCAKE: Final = Format("mooncake", 512, 1e-3, _BODY, _OURS + _BAILIAN)
AIPERF: Final = Format("aiperf", 512, 1e-3, _BODY, _OURS + _BAILIAN, timed=False)
BAILIAN: Final = Format("qwen-bailian", 16, 1.0, (*_BODY, "chat_id"), _OURS + _AIPERF)
RECORDED: Final = Format(
    "kvgraph", None, 1.0, (*_BODY, "at"), ("timestamp", *_BAILIAN, *_AIPERF, "kvgraph_trace")
)
HEADER_VERSION: Final = 1

# Not strict: exporters of tables write 1024.0 or "1024" where a column has a null.
_decoder: Final = msgspec.json.Decoder(Line, strict=False)
_EMPTY_CELL: Final = re.compile(rb'(:\s*)(?:NaN|"")(?=\s*[,}])')
_T = TypeVar("_T")


def decode_line(data: bytes) -> Line:
    """Decode a line, with each field within its bounds; raises TraceError."""
    try:
        return decoded(_decoder, data)
    except msgspec.ValidationError as error:
        raise TraceError(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        why = str(error) or type(error).__name__
        raise TraceError(f"{why}; allowed: one JSON object in each line") from None


def decoded(decoder: msgspec.json.Decoder[_T], data: bytes) -> _T:
    """Decode JSON in which a table's empty cell may be NaN or "", if nothing else fits."""
    try:
        return decoder.decode(data)
    except msgspec.DecodeError:
        filled = _EMPTY_CELL.sub(rb"\1null", data)
        if filled == data:
            raise
    return decoder.decode(filled)


def detect(first: Line) -> Format:
    """Return the format of the lines, as shown by the first one; raises TraceError."""
    if first.kvgraph_trace is not None:
        if first.kvgraph_trace != HEADER_VERSION or first.block_size is None:
            raise TraceError(
                f"kvgraph_trace = {first.kvgraph_trace}: allowed: {HEADER_VERSION}, with block_size"
            )
        return RECORDED
    if first.chat_id is not None:
        return BAILIAN
    if first.session_id is not None or first.delay is not None:
        return AIPERF
    if first.hash_ids is not None and first.timestamp is not None:
        return MOONCAKE
    raise TraceError(
        "no known trace format; allowed: mooncake (timestamp, input_length, output_length, "
        "hash_ids), aiperf (and session_id, delay), qwen-bailian (and chat_id, parent_chat_id, "
        "turn), kvgraph (what `kvgraph record` writes)"
    )


MAX_LINE: Final = 8 << 20  # bytes: a prompt of a million blocks still fits; chosen
_GZIP_MAGIC: Final = b"\x1f\x8b"
_MARK: Final = b"\xef\xbb\xbf"  # UTF-8's byte order mark, which spreadsheets write
_UTF16: Final = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)  # as PowerShell writes texts
_PACKED: Final = {
    b"\x28\xb5\x2f\xfd": "zstd", b"\xfd7zXZ": "xz", b"BZh": "bzip2", b"PK\x03\x04": "zip",
}  # fmt: skip
"""First bytes of compressed formats that are not unpacked here."""
MAX_ARRAY: Final = 256 << 20  # bytes of a trace that is one JSON array; chosen: it is read whole
_entries: Final = msgspec.json.Decoder(list[msgspec.Raw])


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield ``(line number, line)``, numbered from 1, without blank lines; for a file that is one
    JSON array, its entries.

    Gzip and UTF-16 are recognised by their content; a byte order mark is left out, and so is a
    comma behind a line. At most ``MAX_LINE`` bytes are held at once, or an array of ``MAX_ARRAY``.
    Raises TraceError.
    """
    number = 0
    with _explained(path, lambda: f":{number + 1}"), _open(path) as file:
        while line := file.readline(MAX_LINE + 1):
            number += 1
            if len(line) > MAX_LINE:
                raise TraceError(f"{path}:{number}: the line is longer than {MAX_LINE} bytes")
            line = line.removeprefix(_MARK).strip()  # of a file that was appended, too
            if line.startswith(b"["):
                yield from _array(path, line + file.read(MAX_ARRAY))
                return
            if line:
                yield number, line.removesuffix(b",")


def _array(path: Path, data: bytes) -> Iterator[tuple[int, bytes]]:
    if len(data) > MAX_ARRAY:
        raise TraceError(
            f"{path}: one JSON array of more than {MAX_ARRAY} bytes; allowed: a line each"
        )
    try:
        entries = decoded(_entries, data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TraceError(f"{path}:1: {error or type(error).__name__}") from None
    yield from ((number, bytes(entry)) for number, entry in enumerate(entries, 1))


def read_whole(path: Path, limit: int) -> bytes:
    """Return a file's content, gzipped or not, without a byte order mark, if it has at most
    ``limit`` bytes. Raises TraceError.
    """
    with _explained(path), _open(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise TraceError(f"{path}: longer than {limit} bytes")
    return data.removeprefix(_MARK)


@contextmanager
def _explained(path: Path, where: Callable[[], str] = str) -> Iterator[None]:
    """Turn what reading a file raises into a TraceError; ``where``: how far it was read."""
    try:
        yield
    except EOFError:
        raise TraceError(f"{path}{where()}: the gzip file is truncated") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise TraceError(f"{path}{where()}: the gzip file is damaged ({error})") from None
    except UnicodeError as error:
        raise TraceError(f"{path}{where()}: {error}") from None
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from None


def new_file(path: Path) -> TextIO:
    """Create a text file, gzipped if named ``.gz``; it must not exist. Raises TraceError."""
    try:
        return cast(TextIO, gzip.open(path, "xt") if path.suffix == ".gz" else path.open("x"))
    except OSError as error:
        raise TraceError(f"{path}: cannot be written: {error.strerror}") from None


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Write a file that takes the place of ``path`` once it is whole. Raises TraceError."""
    try:
        if path.exists() and not path.is_file():  # /dev/stdout, a pipe
            with path.open("wb") as file:
                yield file
            return
        target = path.resolve()  # a link stays one
        aside = target.with_name(f".{target.name}.{os.getpid()}.part")
        try:
            with aside.open("wb") as file:
                yield file
            aside.replace(target)
        finally:
            with suppress(OSError):
                aside.unlink(missing_ok=True)
    except OSError as error:
        raise TraceError(f"{path}: cannot be written: {error.strerror or error}") from None


def _open(path: Path) -> BufferedReader:
    """Open a file, unpacked if it is gzipped, and in UTF-8. Raises TraceError: it is packed
    otherwise, or is a pipe, which might be waited for without end, and cannot be opened a second
    time.
    """
    if path.is_fifo():
        raise TraceError(f"{path}: is a pipe; allowed: a file")
    with path.open("rb") as file:
        begins = file.read(8)
    packed = next((how for magic, how in _PACKED.items() if begins.startswith(magic)), None)
    if packed is not None:
        raise TraceError(f"{path}: is packed by {packed}; allowed: gzip, or unpacked")
    file = _unpacked(path, begins.startswith(_GZIP_MAGIC))
    return BufferedReader(_InUtf8(file)) if file.peek(2).startswith(_UTF16) else file


def _unpacked(path: Path, zipped: bool) -> BufferedReader:
    return BufferedReader(gzip.open(path, "rb")) if zipped else path.open("rb")


class _InUtf8(RawIOBase):
    """A file in UTF-16, as bytes of UTF-8."""

    def __init__(self, file: BufferedReader) -> None:
        self._text = TextIOWrapper(file, "utf-16", newline="")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._text.read(len(buffer) // 4).encode()  # a character takes four bytes at most
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._text.close()
        super().close()


_COARSE_S: Final = 1.0  # ticks at least so long are spread; chosen
_LEAST_TICKS: Final = 16  # fewer show nothing about a clock; chosen
_REGULAR: Final = 0.95  # share of the gaps between time stamps that are whole ticks; chosen


def spread_over_ticks(at: Floats) -> Floats:
    """Spread arrivals of one tick of a coarse clock evenly over it, in the same order.

    The Mooncake traces were exported with a clock of 3 s: ten requests share a time stamp. Taken
    literally, this is a burst every 3 s with silence in between, in which no ranking could know a
    request before the next nine. Times finer than a second, or without such clusters, are
    unchanged.
    """
    stamps, first, count = np.unique(at, return_index=True, return_counts=True)
    if len(stamps) < _LEAST_TICKS or len(at) < 2 * len(stamps):
        return at
    gaps = np.diff(stamps)
    tick = float(np.median(gaps))
    off_beat = np.abs(gaps / tick - np.round(gaps / tick))
    if tick < _COARSE_S or np.mean(off_beat < 0.01) < _REGULAR:
        return at
    room = np.minimum(np.append(gaps, tick), tick)
    place = np.arange(len(at)) - np.repeat(first, count)
    return np.asarray(at + place * np.repeat(room / count, count))


def infer_sessions(chains: Sequence[Sequence[int]], full: Sequence[int], num_blocks: int) -> Ints:
    """Return the session that each request continues, or a new one, int32 ``[requests]``.

    Applies the rules of the live graph (``sessions.continued``), as far as a trace allows, and no
    request continues a branch that its session abandoned. A trace does not show which requests run
    at the same time.
    """
    owner = np.full(num_blocks, NO_ROW, dtype=np.int32)
    left = np.zeros(num_blocks, dtype=np.bool_)  # behind by its session
    first, reach, turns = np.zeros((3, len(chains)), dtype=np.int32)
    sessions = np.empty(len(chains), dtype=np.int32)
    last: list[npt.NDArray[np.int64]] = []  # blocks of each session's last request
    for request, blocks in enumerate(chains):
        chain = np.asarray(blocks, dtype=np.int64)
        walked, behind = owner[chain], left[chain]
        session = continued(walked, first, reach, turns)
        if session == NO_ROW or behind.any():
            session = len(last)
            last.append(chain[:0])
            first[session] = full[request]
        left[last[session][owner[last[session]] == session]] = True
        left[chain] = False
        last[session], reach[session] = chain, full[request]
        turns[session] += 1
        sessions[request] = session
        own = (walked == NO_ROW) | (walked == session) | behind
        owner[chain] = np.where(own, session, SHARED)
    return sessions


class StatementsDraft:
    def __init__(self) -> None:
        self._ended, self._waiting = array("b"), array("b")
        self._expected, self._seconds = array("d"), array("d")
        self._layers: list[TraceLayers] = []
        self._known: dict[TraceLayers, TraceLayers] = {}  # equal parts are kept once
        self._tenant = array("i")
        self._tenants: dict[str, int] = {}

    def add(self, line: Line) -> None:
        """Add a request's line; raises TraceError."""
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

    def said(self, order: Sequence[int]) -> Statements:
        return Statements(
            np.array(self._ended, dtype=np.bool_)[order],
            np.array(self._waiting, dtype=np.int8)[order],
            np.array(self._expected)[order],
            np.array(self._seconds)[order],
            tuple(self._layers[request] for request in order),
            np.array(self._tenant, dtype=np.int32)[order],
        )


def _layers(line: Line) -> TraceLayers:
    layers = []
    for name, start, end in line.layers or ():
        if name not in LAYER_BY_NAME:
            raise TraceError(f"layers: {name!r}: allowed: {', '.join(LAYER_NAMES)}")
        if not start <= end <= (line.input_length or 0):
            raise TraceError(f"layers: tokens {start} to {end} of {line.input_length}")
        layers.append((LAYER_BY_NAME[name], start, end))
    return tuple(layers)


MAX_REFERENCES: Final = 50_000_000
"""Requests and block references read from one file; a gzip bomb costs 250 bytes each."""


def load_trace(path: Path, *, block_size: int | None = None) -> Trace:
    """Read a trace of any known format, gzipped or not; requests are sorted by arrival.

    Args:
        block_size: Tokens per hash id, if different from the format's.

    Raises:
        TraceError: Names the file and the line that cannot be used.
    """
    draft: _Draft | None = None
    number = 0
    for number, data in read_lines(path):
        try:
            line = decode_line(data)
            if draft is None:
                found = detect(line)
                draft = _Draft(found, block_size or found.block_size or line.block_size or 0)
                if found is RECORDED:
                    continue
            draft.add(line)
        except TraceError as error:
            raise TraceError(f"{path}:{number}: {error}") from None
    if draft is None or not draft.at:
        raise TraceError(f"{path}:{number}: the trace is empty: it holds no request")
    return draft.trace(path.name)


def recorded_trace(lines: Iterable[dict[str, Any]], name: str) -> Trace:
    """Make a trace of lines in our own format, the header first; raises TraceError."""
    header, *requests = (decode_line(msgspec.json.encode(line)) for line in lines)
    draft = _Draft(RECORDED, header.block_size or 0)
    for line in requests:
        draft.add(line)
    return draft.trace(name)


class _Draft:
    def __init__(self, kind: Format, block_size: int) -> None:
        self.at = array("d")
        self._kind = kind
        self._size = block_size
        self._inputs, self._outputs = array("q"), array("q")
        self._prompts, self._lengths = array("q"), array("q")
        self._ids = array("q")
        self._links: dict[tuple[int, int], int] = {}  # (block before, hash) → block
        self._sessions = array("q")
        self._session_rows: dict[str | int, int] = {}
        self._same: list[int] = []  # row of a session → an earlier one that is the same, or itself
        self._free_at: dict[int, float] = {}  # session → when its turn before was done
        self._service = ServiceModel()
        self._said = StatementsDraft()

    def add(self, line: Line) -> None:
        self._kind.check(line)
        assert line.input_length is not None
        assert line.hash_ids is not None
        self._check_blocks(line.input_length, len(line.hash_ids))
        session = self._session(line)
        at = self._arrival(line, session)
        chain = self._chain(line.hash_ids + (line.output_hash_ids or []))
        if len(self._ids) + len(self.at) + len(chain) > MAX_REFERENCES:
            raise TraceError(f"more than {MAX_REFERENCES:,} requests and block references")
        self._said.add(line)
        self._ids.extend(chain)
        self._lengths.append(len(chain))
        self._prompts.append(len(line.hash_ids))
        self._inputs.append(line.input_length)
        self._outputs.append(line.output_length or 0)
        self._sessions.append(session)
        self.at.append(at)

    def trace(self, name: str) -> Trace:
        """Return what was read, sorted by arrival, with its sessions."""
        at = np.array(self.at)
        order = np.argsort(at, kind="stable")
        lengths = np.array(self._lengths)[order]
        starts = np.append(0, np.cumsum(lengths))
        begins = np.append(0, np.cumsum(self._lengths))[order]
        where = np.repeat(begins - starts[:-1], lengths) + np.arange(starts[-1])
        blocks = np.array(self._ids, dtype=np.int32)[where]
        inputs = np.array(self._inputs)[order]
        prompts = np.array(self._prompts)[order]
        full = np.minimum(prompts, inputs // self._size)
        # An engine computes at least one prompt token itself. Other formats count partial blocks.
        recorded = self._kind is RECORDED
        matchable = np.minimum(prompts, (inputs - 1) // self._size) if recorded else prompts
        named = bool(self._session_rows)
        session = np.array(self._sessions, dtype=np.int32)[order]
        if self._same:
            rows = np.array([self._first(row) for row in session.tolist()], dtype=np.int32)
            _, first, inverse = np.unique(rows, return_index=True, return_inverse=True)
            session = np.argsort(np.argsort(first))[inverse].astype(np.int32)
        if not named:
            flat, ends = blocks.tolist(), starts.tolist()
            chains = [flat[a:b] for a, b in pairwise(ends)]
            session = infer_sessions(chains, full.tolist(), len(self._links))
        else:  # a request without a name, among named ones, is a session of its own
            unnamed = np.flatnonzero(session < 0)
            session[unnamed] = len(self._session_rows) + np.arange(len(unnamed), dtype=np.int32)
        return Trace(
            name,
            self._size,
            spread_over_ticks(at[order] - at.min()),
            inputs.astype(np.int32),
            np.array(self._outputs, dtype=np.int32)[order],
            starts,
            blocks,
            prompts.astype(np.int32),
            full.astype(np.int32),
            matchable.astype(np.int32),
            session,
            last_turns(session),
            named,
            self._said.said(order.tolist()),
        )

    def _check_blocks(self, tokens: int, blocks: int) -> None:
        if tokens < 1:
            raise TraceError(f"input_length is {tokens}; allowed: 1 token or more")
        least, most = tokens // self._size, -(-tokens // self._size)
        if not least <= blocks <= most:
            raise TraceError(
                f"hash_ids has {blocks} entries; {tokens} tokens in blocks of {self._size} need "
                + (f"{least}" if least == most else f"{least} or {most}")
            )

    def _chain(self, hashes: list[int]) -> list[int]:
        """Return block ids of a chain; a hash behind another prefix is another block."""
        before, chain = -1, []
        for value in hashes:
            before = self._links.setdefault((before, value), len(self._links))
            chain.append(before)
        return chain

    def _arrival(self, line: Line, session: int) -> float:
        if line.at is not None:
            return line.at
        if line.timestamp is not None:
            at = line.timestamp * self._kind.unit
        else:
            # A closed loop, as far as one pass can tell: sessions begin together, and each turn
            # comes after the answer to the one before.
            at = self._free_at.get(session, 0.0) + (line.delay or 0.0) * self._kind.unit
        if session >= 0 and self._kind is not BAILIAN:
            assert line.input_length is not None
            self._free_at[session] = at + self._service.seconds(
                line.input_length, line.output_length or 0
            )
        return at

    def _session(self, line: Line) -> int:
        """Return the row of the session that the line names; -1 if it names none."""
        name: str | int | None = line.session if self._kind is RECORDED else line.session_id
        if self._kind is BAILIAN:
            return self._conversation(line)
        if name is None or name == "":  # an empty cell of a table
            return -1
        return self._session_rows.setdefault(name, len(self._session_rows))

    def _conversation(self, line: Line) -> int:
        """Return the conversation's row; the chat that one continues may stand further down."""
        assert line.chat_id is not None
        row = self._row_of(line.chat_id)
        if line.parent_chat_id is not None and line.parent_chat_id >= 0:
            one, other = sorted([self._first(row), self._first(self._row_of(line.parent_chat_id))])
            self._same[other] = one
        return row

    def _row_of(self, chat: int) -> int:
        row = self._session_rows.setdefault(chat, len(self._same))
        if row == len(self._same):
            self._same.append(row)
        return row

    def _first(self, row: int) -> int:
        while self._same[row] != row:
            self._same[row] = row = self._same[self._same[row]]
        return row
