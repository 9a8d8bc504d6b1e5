"""The requests that were sent, as a trace for the lab: the same blocks, at the times of sending."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kvgraph.advisor.replay.fleet_traffic import write_trace
from kvgraph.advisor.replay.reader import HEADER_VERSION, load_trace
from kvgraph.advisor.replay.trace import Trace

from ..serving.workload import BLOCK
from .agents_requests import AgentRequest


def engine_trace(
    requests: Sequence[AgentRequest],
    sent_s: Sequence[float],
    pace: float,
    path: Path,
    took_s: Sequence[float] | None = None,
) -> Trace:
    """Write what was sent as a recording in ``path``, and read it as the lab does.

    Args:
        sent_s: When each was sent, in seconds since the first.
        pace: Seconds that a recorded second took: hints were scaled by it.
        took_s: How long each took; None: no time at all.
    """
    took_s = took_s or [0.0] * len(requests)
    write_trace(_lines(requests, sent_s, took_s, pace), path)
    return load_trace(path)


def _lines(
    requests: Sequence[AgentRequest],
    sent_s: Sequence[float],
    took_s: Sequence[float],
    pace: float,
) -> Iterator[dict[str, Any]]:
    yield {"kvgraph_trace": HEADER_VERSION, "block_size": BLOCK}
    blocks = _Blocks()
    for request, at, took in zip(requests, sent_s, took_s, strict=True):
        # The engine never computes the last token that it says.
        kept = blocks.chain(request.prompt + request.answer[:-1])
        prompt = len(request.prompt) // BLOCK
        line: dict[str, Any] = {
            "at": round(at, 6),
            "seconds": round(took, 6),
            "input_length": len(request.prompt),
            "output_length": len(request.answer),
            "session": request.session,
            "hash_ids": kept[:prompt],
            "output_hash_ids": kept[prompt:],
        }
        if request.ended:
            line["ended"] = True
        elif request.waiting is not None:
            line["waiting_for_tool"] = request.waiting
        if request.waiting and request.returns_s is not None:
            line["expected_return_s"] = round(pace * request.returns_s, 3)
        yield line


class _Blocks:
    """Numbers the engine's full blocks by their tokens and all that stands before them."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, tuple[int, ...]], int] = {}

    def chain(self, tokens: tuple[int, ...]) -> list[int]:
        before, chain = -1, []
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            key = (before, tokens[start : start + BLOCK])
            before = self._numbers.setdefault(key, len(self._numbers))
            chain.append(before)
        return chain
