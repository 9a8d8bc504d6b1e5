"""Writes a fleet as a trace file of our own format, with its callers' hints."""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec

from ..errors import TraceError
from ..traces.formats import HEADER_VERSION
from .fleet import FleetRequest
from .fleet_blocks import BlockNumbers
from .signals import Signals, layers, rough_return_s, waiting_for_tool


def trace_lines(
    requests: Sequence[FleetRequest],
    block_size: int,
    signals: Signals,
    seed: int,
    *,
    with_layers: bool = False,
) -> Iterator[dict[str, Any]]:
    """The header, and one line per request.

    Args:
        with_layers: Callers also say where the parts of a prompt's head are.

    Raises:
        ReplayError: ``block_size`` is no multiple of the recorded one.
    """
    yield {"kvgraph_trace": HEADER_VERSION, "block_size": block_size}
    numbers = BlockNumbers(block_size)
    for request in requests:
        turn = request.turn
        line: dict[str, Any] = {
            "at": round(request.at, 3),
            "input_length": turn.input_tokens,
            "output_length": turn.output_tokens,
            "session": request.run,
            **_said(request, signals, seed),
            **({"layers": layers(request)} if with_layers else {}),
            "hash_ids": numbers.prompt(request),
            "output_hash_ids": numbers.answer(request),
        }
        if turn.api_s is not None:
            line["seconds"] = turn.api_s
        yield line


def write_trace(lines: Iterator[dict[str, Any]], path: Path) -> int:
    """Write a trace, gzipped if the name ends in ``.gz``; equal lines give equal files.

    Returns:
        How many lines.

    Raises:
        TraceError: The file cannot be written.
    """
    count = 0
    try:
        with path.open("wb") as raw, _zipped(raw) if path.suffix == ".gz" else raw as file:
            for line in lines:
                file.write(msgspec.json.encode(line) + b"\n")
                count += 1
    except OSError as error:
        raise TraceError(f"{path}: cannot be written: {error.strerror or error}") from None
    return count


def _zipped(raw: BinaryIO) -> BinaryIO:
    """A gzip file without the time of day in it, so that equal lines give equal files."""
    return cast(BinaryIO, gzip.GzipFile("", "wb", fileobj=raw, mtime=0))


def _said(request: FleetRequest, signals: Signals, seed: int) -> dict[str, Any]:
    """The fields that a caller fills in; unknown ones are absent."""
    said: dict[str, Any] = {}
    if signals in (Signals.ENDS, Signals.ALL) and request.next_turn is None:
        said["ended"] = True
    if signals in (Signals.STOPS, Signals.ALL):
        said["waiting_for_tool"] = waiting_for_tool(request)
    if signals is Signals.ALL:
        said["expected_return_s"] = rough_return_s(request, seed)
    return {name: value for name, value in said.items() if value is not None}
