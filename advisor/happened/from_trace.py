"""Reads what happened from a trace that ``kvgraph record`` wrote: requests, without reasons."""

from __future__ import annotations

from pathlib import Path

from ...dashboards.answers.misses import BlockCounts, RequestView
from ..replay.errors import TraceError
from ..replay.traces.formats import RECORDED, Line, decode_line, detect
from ..replay.traces.lines import read_lines
from .happened import Happened

_UNKNOWN = (
    "A trace tells what requests found in the pool. Why they found no more, what came from colder "
    "tiers and what was evicted is in raw logs alone (`kvgraph record --raw`)."
)


def happened_in_trace(path: Path) -> Happened:
    """The requests of a trace, by their arrival.

    Raises:
        TraceError: The file cannot be read, or is a trace of another format: those do not say what
            was found.
    """
    requests: list[RequestView] = []
    size = 0
    for number, data in read_lines(path):
        try:
            line = decode_line(data)
            if number == 1:
                size = _block_size(line)
            else:
                RECORDED.check(line)
                requests.append(_request(line, len(requests), size))
        except TraceError as error:
            raise TraceError(f"{path}:{number}: {error}") from None
    requests.sort(key=lambda each: each.at)
    return Happened(
        name=path.name,
        begin=0.0,
        end=max((each.ended_at or each.at for each in requests), default=0.0),
        engines={"recorded": "recorded"},
        requests=requests,
        evictions=None,
        lives=[],
        pools=[],
        has_reasons=False,
        unknown=[_UNKNOWN],
    )


def _block_size(first: Line) -> int:
    if detect(first) is not RECORDED or first.block_size is None:
        raise TraceError("a trace of this format does not say what requests found in a cache")
    return first.block_size


def _request(line: Line, number: int, size: int) -> RequestView:
    tokens, took, at = line.input_length or 0, line.seconds, line.at or 0.0
    asked = tokens // size
    found = min(asked, (line.cached_tokens or 0) // size)
    return RequestView(
        id=number,
        request=str(number),
        engine="recorded",
        session=line.session,
        tenant=line.tenant,
        at=at,
        prompt_tokens=tokens,
        block_size=size,
        blocks=BlockCounts(
            asked=asked, pool=found, loaded=0, prefetched=0, spliced=0, computed=asked - found
        ),
        finished=None if took is None else "finished",
        ended_at=None if took is None else at + took,
        expected_pause_s=line.expected_return_s,
        miss=None,
    )
