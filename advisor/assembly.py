"""``Sidecar``: makes the parts of a sidecar by its configuration, and connects them."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import zmq

from ..graph.kvcache_graph import KVCacheGraph
from ..graph.types import MAX_ENGINES
from ..graph.wire.curve_keys import load_sidecar_keys
from ..graph.wire.endpoints import Wake, runtime_dir
from .config.config import Config
from .config.edits import ConfigWatch
from .intake import Intake, Tap
from .planner import GraphEvictionAdvisor
from .process.snapshots import SnapshotKeeper
from .shadows.runner import ShadowRunner
from .sockets.front import EngineListener
from .sockets.kv_events import KvEventSource
from .sockets.publisher import AdvicePublisher
from .sockets.subscriber import EventSubscriber
from .tracing import SpanFeed, sender_for

logger = logging.getLogger(__name__)


class Sidecar:
    """The parts of a sidecar, without its HTTP surface. Engines can connect as soon as it is made,
    and are not read yet. Raises ConfigError.
    """

    def __init__(
        self,
        config: Config,
        opened: ExitStack,  # receives what must be closed, in that order
        *,
        path: Path | None,
        overrides: Mapping[str, Any],
        tap: Tap | None,
        clock: Callable[[], float],
    ) -> None:
        sidecar = config.sidecar
        self.wake = Wake()  # wakes the loop
        opened.callback(self.wake.close)
        self.graph = graph = new_graph(config, clock)
        # It opens a tcp endpoint, and HTTP answers about sessions and blocks.
        self.token = sidecar.token or secrets.token_urlsafe(24)
        self.front, self.sources = _open_sockets(config, self.token, opened, clock)
        self.publisher = AdvicePublisher(self.front.socket, clock)
        self.subscriber = subscriber = EventSubscriber(
            self.front.socket,
            self.publisher.request_resync,
            self.publisher.refuse,
            clock,
            engine_timeout_s=sidecar.engine_timeout_s,
            capacity=MAX_ENGINES - len(sidecar.observe),
        )
        self.planner = GraphEvictionAdvisor(
            graph,
            lambda: {peer.engine: peer.heard for peer in subscriber.peers if peer.synced},
            interval_s=sidecar.interval_s,
            max_ranked=sidecar.max_ranked,
            prefetch=config.prefetch,
            clock=clock,
            wake=self.wake.set,
        )
        self.intake = Intake(graph, subscriber, self.sources, self.planner, tap, clock)
        self.snapshots = SnapshotKeeper(
            graph, sidecar.snapshot_path, sidecar.snapshot_interval_s, clock
        )
        self.shadows = ShadowRunner(graph, clock)
        self.tracing = SpanFeed(graph, sender_for(config.tracing), clock)
        self.watch = ConfigWatch(config, path, overrides, clock)


def new_graph(config: Config, clock: Callable[[], float]) -> KVCacheGraph:
    return KVCacheGraph(
        policy=config.policy.policy(config.score.weights()),
        rules=config.rules(),
        referee=config.policy.referee(),
        limits=config.graph.limits(),
        models={engine: each.model or engine for engine, each in config.sidecar.observed().items()},
        clock=clock,
    )


def _open_sockets(
    config: Config, token: str, opened: ExitStack, clock: Callable[[], float]
) -> tuple[EngineListener, list[KvEventSource]]:
    folder = config.sidecar.keys
    keys = load_sidecar_keys(folder, zmq.curve_public) if folder else None
    front = EngineListener(
        config.sidecar.endpoint or f"ipc://{runtime_dir()}/sidecar.sock", token, keys
    )
    opened.callback(front.close)
    if keys is not None and not front.is_tcp:
        logger.warning("sidecar.keys are not used: no key opens %s", front.endpoint)
    elif keys is not None:
        logger.info(
            "engines connect at %s by key; keys that are allowed, in %s: %d",
            front.endpoint,
            keys.engines,
            len(keys.allowed()),
        )
    sources = [
        KvEventSource(front.context, each, clock, engine=engine)
        for engine, each in config.sidecar.observed().items()
    ]
    for source in sources:
        opened.callback(source.close)
    return front, sources
