"""The HTTP surface of `kvgraph route`: ``/v1/…`` goes to an engine, the rest is about the proxy."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Router

from ..process.process import PROBES
from .proxy import Counts, FleetProxy
from .relay import Relay, json_response, served_app
from .residency import ResidencyView

_COUNTS = tuple(each.name for each in fields(Counts))


def proxy_status(proxy: FleetProxy) -> dict[str, Any]:
    """Return what ``GET /fleet`` answers: engines, decisions, counts, and no session names."""
    board, health, times = proxy.board, proxy.health, list(proxy.decided_s)
    engines = [
        {
            "number": each.number,
            "url": each.url,
            "up": bool(board.up[each.number]),
            "drains": bool(board.draining[each.number]),
            "asked": each.asked,
            "running": each.running,
            "refusing": int(board.refusing[each.number]),
            "waiting_tokens": int(board.waiting[each.number]),
            "live_tokens": int(board.live[each.number]),
            "prefill_tokens_per_s": _speed(proxy, each.number),
            "why": health.why.get(each.number),
            "wants_key": each.number in health.keyed,
            "refused": health.refused.get(each.number),
            "differs": health.differs(each.number),
        }
        for each in proxy.engines.shown
    ]
    return {
        "engines": engines,
        "decisions": {str(reason): number for reason, number in proxy.router.counts.items()},
        "requests": {name: getattr(proxy.counts, name) for name in _COUNTS},
        "sessions": len(proxy.router.homes),
        "sessions_of_sidecars": 0 if proxy.residency is None else len(proxy.residency),
        "sidecars": [] if proxy.residency is None else _sidecars(proxy.residency),
        "failed_rounds": 0 if proxy.residency is None else proxy.residency.failed,
        "decision_p99_ms": 1e3 * float(np.percentile(times, 99)) if times else 0.0,
    }


def _speed(proxy: FleetProxy, number: int) -> int | None:
    """Return prompt tokens per second, or None until they were measured."""
    board = proxy.board
    return round(1 / float(board.compute_s[number])) if board.timed[number] else None


def _sidecars(residency: ResidencyView) -> list[dict[str, Any]]:
    return [
        {"url": url, "silent": silent, "unheard_s": round(residency.unheard_s(url), 1)}
        for url, silent in residency.silent.items()
    ]


def exposition(proxy: FleetProxy) -> bytes:
    """Return the proxy's metrics in Prometheus' text format."""
    return generate_latest(_ProxyCollector(proxy))


class _ProxyCollector(Collector):
    def __init__(self, proxy: FleetProxy) -> None:
        self._proxy = proxy

    def collect(self) -> Iterator[Metric]:
        yield from self._engines()
        decisions = CounterMetricFamily(
            "kvgraph_route_decisions", "Requests by why they went where.", labels=["reason"]
        )
        for reason, number in self._proxy.router.counts.items():
            decisions.add_metric([str(reason)], number)
        yield decisions
        requests = CounterMetricFamily(
            "kvgraph_route_requests", "Requests by what happened to them.", labels=["outcome"]
        )
        for name in _COUNTS:
            requests.add_metric([name], getattr(self._proxy.counts, name))
        yield requests

    def _engines(self) -> Iterator[Metric]:
        board = self._proxy.board
        in_flight = [each.asked + each.running for each in self._proxy.engines.upstreams]
        columns: dict[str, tuple[str, Sequence[float] | npt.NDArray[Any]]] = {
            "up": ("Whether the engine answers.", board.up),
            "draining": ("Whether it gets no further requests.", board.draining),
            "refusing": ("Requests in a row that it refused or dropped.", board.refusing),
            "waiting_tokens": ("Prompt tokens that wait there.", board.waiting),
            "live_tokens": ("Tokens of live sessions at home there.", board.live),
            "in_flight": ("Requests that it has not answered to the end.", in_flight),
        }
        for name, (words, column) in columns.items():
            gauge = GaugeMetricFamily(f"kvgraph_route_engine_{name}", words, labels=["engine"])
            for each in self._proxy.engines.shown:
                gauge.add_metric([each.url], float(column[each.number]))
            yield gauge


def route_app(proxy: FleetProxy) -> Router:
    """Return the ASGI application of `kvgraph route`; it starts and closes the proxy."""

    async def probe(_: Request) -> Response:
        up = bool(proxy.board.takes.any())
        return json_response({"status": "ok" if up else "no engine is up"}, 200 if up else 503)

    async def fleet(_: Request) -> Response:
        return json_response(proxy_status(proxy))

    async def metrics(_: Request) -> Response:
        return Response(exposition(proxy), headers={"content-type": "text/plain; version=0.0.4"})

    @contextlib.asynccontextmanager
    async def lifespan(_: object) -> AsyncIterator[None]:
        await proxy.start()
        yield
        await proxy.close()

    views = {**dict.fromkeys(PROBES, probe), "/fleet": fleet, "/metrics": metrics}
    return served_app(views, Relay(proxy), lifespan)
