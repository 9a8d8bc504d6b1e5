"""What a request's trace says: the request, its wait, its lookup, its load, and its miss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ...dashboards.answers.misses import Miss, RequestView, Wait


class SpanRecord(NamedTuple):
    """One span; times are Unix seconds, and an attribute that is None is not known."""

    name: str
    begin: float
    end: float
    attributes: Mapping[str, Any]


def spans_of(request: RequestView) -> list[SpanRecord]:
    """The request's own span, and then those within it.

    Names and keys are those that the API shows. vLLM's own traces have the beginning of
    ``kvgraph.request`` as ``gen_ai.request.id``: the engine adds a random part to it.
    """
    ended = request.at if request.ended_at is None else max(request.at, request.ended_at)
    blocks = request.blocks
    attributes = {
        "kvgraph.request": request.request,
        "kvgraph.engine": request.engine,
        "kvgraph.session": request.session,
        "kvgraph.tenant": request.tenant,
        "kvgraph.prompt_tokens": request.prompt_tokens,
        "kvgraph.block_size": request.block_size,
        "kvgraph.blocks.asked": blocks.asked,
        "kvgraph.blocks.computed": blocks.computed,
        "kvgraph.finished": request.finished,
        "kvgraph.expected_pause_s": request.expected_pause_s,
        "kvgraph.remedies": " ".join(each.text for each in request.remedies) or None,
    }
    return [SpanRecord("request", request.arrived, ended, attributes), *_within(request)]


def _within(request: RequestView) -> Iterator[SpanRecord]:
    """Its wait, and what happened when it was first scheduled, which takes no time by the engine's
    account."""
    at, blocks = request.at, request.blocks
    if request.wait is not None:
        yield SpanRecord("wait", request.arrived, at, _of_wait(request.wait))
    yield SpanRecord("lookup", at, at, {
        "kvgraph.blocks.asked": blocks.asked,
        "kvgraph.blocks.pool": blocks.pool,
        "kvgraph.blocks.prefetched": blocks.prefetched,
    })  # fmt: skip
    if blocks.loaded:
        yield SpanRecord("load", at, at, {"kvgraph.blocks.loaded": blocks.loaded})
    if request.miss is not None:
        yield SpanRecord("miss", at, at, _of_miss(request.miss))


def _of_wait(wait: Wait) -> dict[str, Any]:
    return {
        "kvgraph.wait.held_s": wait.held_s,
        "kvgraph.wait.held_until": wait.until,
        "kvgraph.wait.sentence": wait.sentence,
    }


def _of_miss(miss: Miss) -> dict[str, Any]:
    return {
        "kvgraph.miss.reason": miss.reason,
        "kvgraph.miss.sentence": miss.sentence,
        "kvgraph.miss.block": miss.index,
        "kvgraph.miss.key": miss.key,
        "kvgraph.miss.session": miss.session,
        "kvgraph.miss.tenant": miss.tenant,
        "kvgraph.miss.engine": miss.engine,
        "kvgraph.miss.evicted_at": miss.evicted_at,
    }
