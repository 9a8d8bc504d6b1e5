"""Reads what happened from a running sidecar's logs, through its HTTP API."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Final
from urllib.parse import quote

from ...dashboards.answers.evictions import EvictionView
from ...dashboards.answers.graph_view import GraphView
from ...dashboards.answers.misses import RequestView
from ..remote import ask_patiently
from ..times.spoken_times import seconds, time_of_day
from .happened import BlockLife, Happened, Minute

_PAGE: Final = 1_000  # records of one answer: the API's bound
MOST_NODES: Final = 200_000  # the API's bound


def happened_at(url: str, most_evictions: int) -> Happened:
    """What a sidecar's logs reach back to.

    Args:
        most_evictions: Of each engine; the newest.

    Raises:
        RemoteError: It does not answer.
    """
    status = ask_patiently(url, "/v1/engines")
    now, names = status["at"], {each["id"]: each["name"] for each in status["engines"]}
    requests, reach = _requests(url)
    cut = {"requests": reach}
    evictions: list[EvictionView] = []
    for engine in ask_patiently(url, "/v1/evictions?limit=1")["engines"]:
        found, cut[f"evictions of {names.get(engine, engine)}"] = _evictions(
            url, engine, most_evictions
        )
        evictions += found
    evictions.sort(key=lambda each: each.at)
    return Happened(
        name=url,
        begin=min((*(r.at for r in requests[:1]), *(e.at for e in evictions[:1])), default=now),
        end=now,
        engines=names,
        requests=requests,
        evictions=evictions,
        lives=[_life(each) for each in evictions],
        pools=[],
        has_reasons=True,
        unknown=[_reach(what, at, now) for what, at in cut.items() if at is not None],
        minutes=list(_minutes(ask_patiently(url, "/v1/misses"))),
        since=max((at for at in cut.values() if at is not None), default=0.0),
    )


def _requests(url: str) -> tuple[list[RequestView], float | None]:
    """The log of requests, the oldest first; and when it begins, if something was before."""
    found = [RequestView.model_validate(each) for each in _paged(url, "/v1/requests?", "requests")]
    return found[::-1], found[-1].at if found and found[-1].id else None


def _evictions(url: str, engine: str, most: int) -> tuple[list[EvictionView], float | None]:
    """An engine's log of evictions; and when it begins, if something was before."""
    records = _paged(url, f"/v1/evictions?engine={quote(engine, safe='')}&", "evictions")
    found = [EvictionView.model_validate(each) for each in islice(records, most)]
    return found, found[-1].at if found and found[-1].id else None


def _minutes(misses: Mapping[str, Any]) -> Iterator[Minute]:
    for place, at in enumerate(misses["starts"]):
        yield Minute(
            at=at,
            asked=misses["asked"][place],
            found=misses["found"][place],
            asked_blocks=misses["asked_blocks"][place],
            evicted=misses["evicted"][place],
            wanted=misses["wanted"][place],
            requests={reason: steps[place] for reason, steps in misses["requests"].items()},
            blocks={reason: steps[place] for reason, steps in misses["blocks"].items()},
        )


def graph_at(url: str) -> GraphView:
    """The graph of a running sidecar, as far as one answer holds it; raises RemoteError."""
    return GraphView.model_validate(ask_patiently(url, f"/v1/graph?limit={MOST_NODES}", 60.0))


def _paged(url: str, path: str, what: str) -> Iterator[dict[str, Any]]:
    """All records of a log, the newest first."""
    answer = ask_patiently(url, f"{path}limit={_PAGE}")
    yield from answer[what]
    while answer["next"] is not None:
        answer = ask_patiently(url, f"{path}limit={_PAGE}&before={answer['next']}")
        yield from answer[what]


def _reach(what: str, at: float, now: float) -> str:
    return (
        f"The log of {what} reaches back {seconds(now - at)}, to {time_of_day(at)}; of what was "
        "before, sums by the minute are known."
    )


def _life(left: EvictionView) -> BlockLife:
    return BlockLife(
        engine=left.engine,
        key=left.key,
        layer=left.layer,
        session=left.session,
        begin=left.at - left.idle_s,
        since_use=True,
        end=left.at,
        why=left.rule,
    )
