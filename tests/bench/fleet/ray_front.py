"""Ray Serve with its router that goes by prefixes, before engines that run: a process of its own.

Called as ``python -P -m kvgraph_bench.fleet.ray_front PORT FOLDER URL URL …``, in a network
of its own, since Ray listens beyond loopback. Each engine stands behind one thin deployment.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import httpx
import ray
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from ray import serve
from ray.serve.config import RequestRouterConfig

PREFIX_AWARE: Final = (
    "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router"
    ".PrefixCacheAffinityRouter"
)
_FIRST_CHARACTER: Final = 0x10000  # from there on, every number is a character


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as Ray's router reads it: its prompt is a text, a character for each token."""

    prompt: str
    body: dict[str, Any]


@serve.deployment(max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0.1})
class Engine:
    def __init__(self, urls: list[str], folder: str) -> None:
        url = next(each for number, each in enumerate(urls) if _take(Path(folder, str(number))))
        self._client = httpx.AsyncClient(base_url=url, timeout=None, trust_env=False)

    async def answer(self, asked: Asked) -> AsyncIterator[bytes]:
        path = "/v1/completions"
        async with self._client.stream("POST", path, json=asked.body) as answer:
            async for chunk in answer.aiter_raw():
                yield chunk


def _take(place: Path) -> bool:
    try:
        place.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


app = FastAPI()


@serve.deployment(ray_actor_options={"num_cpus": 0.1})
@serve.ingress(app)
class Front:
    """Reads each request, so that the router sees its prompt."""

    def __init__(self, engines: Any) -> None:
        self._engines = engines.options(stream=True)

    @app.get("/health")
    async def health(self) -> str:
        return "runs"

    @app.post("/v1/completions")
    async def complete(self, request: Request) -> StreamingResponse:
        body = await request.json()
        asked = Asked("".join(chr(_FIRST_CHARACTER + token) for token in body["prompt"]), body)
        chunks = self._engines.answer.remote(asked)
        return StreamingResponse(chunks, media_type="text/event-stream")


def main(port: int, folder: str, urls: list[str]) -> None:
    over = threading.Event()
    ray.init(
        num_cpus=2, include_dashboard=False, object_store_memory=200 << 20, _temp_dir=folder,
        _node_ip_address="127.0.0.1", log_to_driver=False,
    )  # fmt: skip
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    router = RequestRouterConfig(request_router_class=PREFIX_AWARE)
    engine, front = cast("Any", Engine), cast("Any", Front)  # decorated: they are deployments
    engines = engine.options(num_replicas=len(urls), request_router_config=router)
    serve.run(front.bind(engines.bind(urls, folder)))
    signal.signal(signal.SIGTERM, lambda *_: over.set())  # last: Ray has a handler of its own
    over.wait()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    # By its name: Ray's processes find the classes there, with what their annotations name.
    from kvgraph_bench.fleet import ray_front

    ray_front.main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
