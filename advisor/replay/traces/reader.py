"""Reads a trace file into columns."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from ..errors import TraceError
from .duration import ServiceModel
from .formats import AIPERF, BAILIAN, RECORDED, Format, Line, decode_line, detect
from .inferred_sessions import infer_sessions
from .lines import read_lines
from .statements import SaidDraft
from .ticks import spread_over_ticks
from .trace import Trace, last_turns

MAX_REFERENCES: Final = 50_000_000
"""Requests and block references that we take from one file; a gzip bomb costs us 250 bytes each."""


def load_trace(
    path: Path,
    *,
    block_size: int | None = None,
    progress: Callable[[int], None] = lambda lines: None,
) -> Trace:
    """Read a trace of any known format, gzipped or not; requests are sorted by arrival.

    Args:
        block_size: Tokens a hash id stands for, if not what the format says.
        progress: Told the number of lines read, now and then.

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
        if number % 1000 == 0:
            progress(number)
    if draft is None or not draft.at:
        raise TraceError(f"{path}:{number}: the trace is empty: it holds no request")
    progress(number)
    return draft.trace(path.name)


def recorded_trace(lines: Iterable[dict[str, Any]], name: str) -> Trace:
    """The trace of lines in our own format, the header first, as if they had been a file's.

    Raises:
        TraceError: A line cannot be used.
    """
    header, *requests = (decode_line(msgspec.json.encode(line)) for line in lines)
    draft = _Draft(RECORDED, header.block_size or 0)
    for line in requests:
        draft.add(line)
    return draft.trace(name)


class _Draft:
    """A trace while it is read, in flat arrays."""

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
        self._said = SaidDraft()

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
        """What was read, sorted by arrival, with its sessions."""
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
        else:  # whom nobody named among others who were is a session of its own
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
        least, most = tokens // self._size, -(-tokens // self._size)
        if tokens < 1 or not least <= blocks <= most:
            raise TraceError(
                f"hash_ids has {blocks} entries; {tokens} tokens in blocks of {self._size} need "
                + (f"{least}" if least == most else f"{least} or {most}")
            )

    def _chain(self, hashes: list[int]) -> list[int]:
        """Block ids of a chain; a hash behind another prefix is another block, whatever the file
        meant."""
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
        if self._kind is AIPERF:
            assert line.input_length is not None
            self._free_at[session] = at + self._service.seconds(
                line.input_length, line.output_length or 0
            )
        return at

    def _session(self, line: Line) -> int:
        """A row for the session that the line names; -1 if it names none."""
        name: str | int | None = line.session if self._kind is RECORDED else line.session_id
        if self._kind is BAILIAN:
            return self._conversation(line)
        if name is None:
            return -1
        return self._session_rows.setdefault(name, len(self._session_rows))

    def _conversation(self, line: Line) -> int:
        """A row for the conversation: a chat points to the chat that it continues, whose line may
        stand behind its own."""
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
        """The first row that is the same conversation's."""
        while self._same[row] != row:
            self._same[row] = row = self._same[self._same[row]]
        return row
