"""The sidecar's HTTP application: health, status, metrics, the page and its API."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache, partial
from threading import Lock
from typing import Annotated, Final

from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import Response
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from ..graph.errors import ConfigError, GraphError
from .access import Access, add_assets, index, wants_page
from .answer import as_json
from .metrics import SidecarCollector
from .server import BodyLimit, TrustedHosts
from .source import BusyError, StatusSource

_CONTENTS: Final = {
    "/healthz": "whether it ranks in time",
    "/readyz": "whether all engines that are linked get advice",
    "/status": "engines, sessions, counters",
    "/metrics": "the same for Prometheus",
    "/blocks/KEY/explain": "why a block ranks where it does; needs the token",
    "/sessions/NAME/explain": "what a session does and holds; needs the token",
    "/memories/ID/explain": "who recalls a memory, and which blocks hold it; needs the token",
    "/waiting": "requests that engines hold until there is room; needs the token",
    "/v1/": "all that the page shows, see /v1/openapi.json; needs the token",
    "/open?token=…": "opens the page in a browser; `kvgraph open` gives the address",
}

Pages = Callable[[Callable[..., None], Callable[..., None]], APIRouter]


def create_app(
    source: StatusSource,
    allowed_hosts: Collection[str],
    token: str,  # the sidecar's secret; see `access`
    questions: APIRouter,  # paths outside `/v1` that name sessions and blocks
    # makes the router of `/v1` from two dependencies: one refuses requests that may not read names,
    # the other requests that may not change anything
    pages: Pages,
) -> FastAPI:
    """Create the application; starts nothing. Wrong input is answered with 4xx and a ``detail``, an
    unknown block or session with 404.
    """
    app = FastAPI(title="kvgraph", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(BodyLimit)
    app.add_middleware(TrustedHosts, hosts=allowed_hosts)  # the outer one
    app.add_exception_handler(GraphError, partial(_told, 404))
    app.add_exception_handler(BusyError, _busy)
    app.add_exception_handler(ConfigError, partial(_told, 409))
    app.add_exception_handler(RequestValidationError, _invalid)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(SidecarCollector(source))
    _add_overview(app, source, registry)
    access = Access(token)
    app.include_router(questions, dependencies=[Depends(access.reads())])
    page = pages(access.reads(), access.edits())
    app.include_router(page)

    describe = cache(lambda: get_openapi(title="kvgraph", version="1", routes=page.routes))
    lock = Lock()

    @app.get("/v1/openapi.json")  # needs no token: it names models and no data
    def schema() -> Response:
        with lock:  # made once, in a fifth of a second in which the sidecar does nothing else
            return as_json(describe())

    @app.get("/open")
    def open_page(request: Request, token: Annotated[str, Query(max_length=256)] = "") -> Response:
        return access.opened(request, token)

    return app


def _add_overview(app: FastAPI, source: StatusSource, registry: CollectorRegistry) -> None:
    @app.get("/")
    async def contents(request: Request) -> Response:
        if wants_page(request):
            return index(request)
        return as_json({"kvgraph": "sidecar", "see": _CONTENTS})

    add_assets(app)

    @app.get("/healthz")
    async def healthz() -> Response:
        healthy = source.is_healthy()
        return as_json({"status": "ok" if healthy else "stalled"}, 200 if healthy else 503)

    @app.get("/readyz")
    async def readyz() -> Response:
        waits_for = source.not_ready()
        body = {"status": "ready"} if waits_for is None else {"status": "waiting", "for": waits_for}
        return as_json(body, 200 if waits_for is None else 503)

    # Some load balancers and charts ask by HEAD, or by other names.
    for path in ("/healthz", "/health", "/live", "/livez", "/ping", "/readyz", "/ready"):
        answer = readyz if path.startswith("/ready") else healthz
        app.add_api_route(path, answer, methods=["GET", "HEAD"], include_in_schema=False)

    @app.get("/status")
    def status() -> Response:
        return as_json(source.status())

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


def _told(status: int, request: Request, error: Exception) -> Response:
    return as_json({"detail": str(error)}, status)


def _busy(request: Request, error: Exception) -> Response:
    assert isinstance(error, BusyError)
    answer = _told(503, request, error)
    answer.headers["Retry-After"] = str(error.again_in_s)
    return answer


def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    # What is wrong and what is allowed, without echoing what was sent.
    wrong = [f"{'.'.join(map(str, each['loc'][1:]))}: {each['msg']}" for each in error.errors()]
    return as_json({"detail": "; ".join(wrong)}, 422)
