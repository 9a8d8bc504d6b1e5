"""What an engine computed while a request waited for its turn."""

from __future__ import annotations

from typing import Final, NamedTuple

from ...dashboards.api.misses import Wait
from ...graph.logs.request_log import RequestLog
from ..reasons.wait_words import wait_remedy, wait_sentence

_TOLD_S: Final = 0.05  # a shorter wait is nobody's question; chosen


class _Prompt(NamedTuple):
    tokens: int  # computed
    again: int  # of these: tokens that had been in the engine's pool before
    number: int


def wait_of(log: RequestLog, number: int) -> Wait | None:
    """What a request waited for; None where it hardly waited."""
    record = log.record(number)
    at, waited = float(record["at"]), float(record["waited"])
    if waited < _TOLD_S:
        return None
    engine = log.names(number).engine
    prompts = [
        _computed(log, each)
        for each in log.scheduled(at - waited, at)
        if log.names(each).engine == engine
    ]
    tokens, again = sum(each.tokens for each in prompts), sum(each.again for each in prompts)
    largest = max(prompts).number if tokens else None
    names = None if largest is None else log.names(largest)
    who = None if names is None else names.session or names.request
    most = max(prompts).tokens if tokens else 0
    return Wait(
        prompts=len(prompts),
        tokens=tokens,
        again=again,
        largest=largest,
        sentence=wait_sentence(len(prompts), tokens, again, who, most),
        remedy=wait_remedy(tokens, again),
    )


def _computed(log: RequestLog, number: int) -> _Prompt:
    record = log.record(number)
    size = int(record["size"])
    found = sum(int(record[name]) for name in ("pool", "loaded", "prefetched", "spliced"))
    return _Prompt(int(record["tokens"]) - found * size, int(record["again"]) * size, number)
