"""Reads recorded agent sessions in the Weka format: one JSON file per session.

The format is that of the public kv-cache-tester corpus. ``tool_tokens`` and ``system_tokens`` are
the lengths of the prompt's head. ``requests`` have ``t`` (s), ``in``, ``out``, ``hash_ids`` (full
blocks, numbered within the file; a number stands for its whole prefix. If ``hash_id_scope`` is
``global``, equal numbers after equal ones are equal blocks in all files), ``stop``, ``api_time``;
entries of type ``subagent`` have ``requests`` of their own, timed from their start.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Final

import msgspec

from .reader import decoded, read_whole
from .trace import TraceError

MAX_FILE: Final = 256 << 20  # bytes, unpacked: chosen; the largest recorded session has 12 MB
_MAX_DEPTH: Final = 8  # of subagents in subagents: chosen

Tokens = Annotated[int, msgspec.Meta(ge=0, le=1 << 30)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e10)]
BlockNumber = Annotated[int, msgspec.Meta(ge=0)]  # up to 2**64 - 1: an array's own bound
Word = Annotated[str, msgspec.Meta(max_length=64)]


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    at: float  # seconds since the session began
    input_tokens: int
    output_tokens: int
    # One number per full block; it stands for the block and everything before it.
    hash_ids: array[int]
    stop: str  # why the answer ended: ``tool_use``, ``end_turn`` …; empty if unknown
    input_types: tuple[str, ...]  # inputs since the turn before: ``text``, ``tool_result`` …
    api_s: float | None  # seconds until the answer was complete; None if unknown


@dataclass(frozen=True, slots=True)
class Session:
    name: str  # the file's, followed by a number for subagents
    block_size: int  # tokens per hash id
    # ``tool_tokens``, ``system_tokens``: the head of the prompt, in this order.
    tool_tokens: int
    system_tokens: int
    began: float  # seconds after its parent's first request; 0 without a parent
    turns: tuple[RecordedTurn, ...]  # by time; at least one
    subagents: tuple[Session, ...]
    # Agent harness with these tools and this system prompt; empty: shared by equal lengths.
    harness: str = ""
    is_global: bool = False  # whether block numbers are valid across all sessions


class _Entry(msgspec.Struct):
    t: Seconds
    type: Word | None = None
    # a request
    input_tokens: Tokens | None = msgspec.field(default=None, name="in")
    output_tokens: Tokens | None = msgspec.field(default=None, name="out")
    hash_ids: list[BlockNumber] | None = None
    stop: Word | None = None
    input_types: list[Word] | None = None
    api_time: Seconds | None = None
    # a subagent
    requests: list[_Entry] | None = None
    tool_tokens: Tokens | None = None
    system_tokens: Tokens | None = None


class _File(msgspec.Struct):
    block_size: Annotated[int, msgspec.Meta(ge=1, le=65_535)]
    requests: list[_Entry]
    tool_tokens: Tokens | None = None
    system_tokens: Tokens | None = None
    hash_id_scope: Word | None = None


_SCOPES: Final = ("local", "global")  # of blocks' numbers
# Not strict: see ``reader``.
_decoder: Final = msgspec.json.Decoder(_File, strict=False)


def read_sessions(
    path: Path, *, progress: Callable[[int], None] = lambda files: None
) -> list[Session]:
    """Read the sessions of a file, or of a directory's ``.json`` and ``.json.gz`` files, by name.
    Raises TraceError.
    """
    paths = [path]
    if path.is_dir():
        paths = sorted(p for p in path.iterdir() if p.name.endswith((".json", ".json.gz")))
        if not paths:
            raise TraceError(f"{path}: no session in it: no file ends in .json or .json.gz")
    sessions: dict[str, Session] = {}
    for number, each in enumerate(paths, 1):
        session = read_session(each)
        if session.name in sessions:
            raise TraceError(f"{each}: a second file of session {session.name}: keep one")
        sessions[session.name] = session
        progress(number)
    return list(sessions.values())


def read_session(path: Path) -> Session:
    """Read the session of one file, gzipped or not; raises TraceError."""
    data = read_whole(path, MAX_FILE)
    try:
        file = decoded(_decoder, data)
        scope = file.hash_id_scope or _SCOPES[0]
        if scope not in _SCOPES:
            raise TraceError(f"hash_id_scope = {scope!r}: allowed: {', '.join(_SCOPES)}")
        name = path.name.removesuffix(".gz").removesuffix(".json")
        head = _Entry(
            t=0.0,
            requests=file.requests,
            tool_tokens=file.tool_tokens,
            system_tokens=file.system_tokens,
        )
        return _Builder(file.block_size, scope == _SCOPES[1]).session(name, head, "requests")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TraceError) as error:
        raise TraceError(f"{path}: {error or type(error).__name__}") from None


class _Builder:
    """Makes sessions of one file's entries, and checks what types cannot."""

    def __init__(self, block_size: int, is_global: bool) -> None:
        self._block_size, self._is_global = block_size, is_global
        self._before: dict[int, int] = {}  # block number → the one before it, -1 for none
        self._checked = array("Q")  # the last chain

    def session(self, name: str, entry: _Entry, where: str, depth: int = 0) -> Session:
        """Return the session of an entry's requests; ``where`` is its field, for errors."""
        if depth > _MAX_DEPTH:
            raise TraceError(f"{where}: subagents are nested deeper than {_MAX_DEPTH}")
        entries = list(enumerate(entry.requests or ()))
        own = [(i, each) for i, each in entries if each.type != "subagent"]
        if not own:
            raise TraceError(f"{where}: it holds no request")
        start = min(each.t for _, each in own)
        turns = [self._turn(each, f"{where}[{i}]", start) for i, each in own]
        agents = [(i, each) for i, each in entries if each.type == "subagent"]
        return Session(
            name,
            self._block_size,
            entry.tool_tokens or 0,
            entry.system_tokens or 0,
            0.0,
            tuple(sorted(turns, key=lambda turn: turn.at)),
            tuple(
                self._subagent(f"{name}.{number}", each, f"{where}[{i}].requests", start, depth)
                for number, (i, each) in enumerate(agents, 1)
            ),
            is_global=self._is_global,
        )

    def _subagent(self, name: str, entry: _Entry, where: str, start: float, depth: int) -> Session:
        found = self.session(name, entry, where, depth + 1)
        return replace(found, began=max(0.0, entry.t - start))

    def _turn(self, entry: _Entry, where: str, start: float) -> RecordedTurn:
        if entry.input_tokens is None or entry.hash_ids is None:
            missing = "in" if entry.input_tokens is None else "hash_ids"
            raise TraceError(f"{where}.{missing} is missing")
        least = entry.input_tokens // self._block_size
        most = -(-entry.input_tokens // self._block_size)
        if entry.input_tokens < 1 or not least <= len(entry.hash_ids) <= most:
            raise TraceError(
                f"{where}.hash_ids has {len(entry.hash_ids)} entries; {entry.input_tokens} tokens "
                f"in blocks of {self._block_size} need {least}"
            )
        try:
            hash_ids = array("Q", entry.hash_ids)
        except OverflowError:
            raise TraceError(f"{where}.hash_ids: allowed: numbers up to 2^64 - 1") from None
        if not self._is_global:
            self._check_prefixes(hash_ids, where)
        return RecordedTurn(
            entry.t - start,
            entry.input_tokens,
            entry.output_tokens or 0,
            hash_ids[:least],
            entry.stop or "",
            tuple(entry.input_types or ()),
            entry.api_time,
        )

    def _check_prefixes(self, hash_ids: array[int], where: str) -> None:
        """Check that each number, which stands for its prefix, follows the same one everywhere."""
        known = len(self._checked)
        start = known if hash_ids[:known] == self._checked else 0
        before = hash_ids[start - 1] if start else -1
        for number in hash_ids[start:]:
            if self._before.setdefault(number, before) != before:
                raise TraceError(f"{where}.hash_ids: {number} follows two different prefixes")
            before = number
        self._checked = hash_ids
