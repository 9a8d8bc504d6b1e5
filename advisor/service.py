"""``Service``: the sidecar's loop, which receives events, applies them, and publishes advice."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final

import typer
import zmq
from threadpoolctl import threadpool_limits

from ..dashboards.access import page_address
from ..dashboards.app import create_app
from ..dashboards.server import HttpServer
from ..graph.errors import ConfigError, InUseError
from ..graph.kvcache_graph import KVCacheGraph
from ..graph.wire.endpoints import LOOPBACK_HOSTS, Note, RunningSidecar, is_loopback
from .assembly import Sidecar
from .config.config import Config, config_path, load, unread_variables
from .config.sections import HttpConfig
from .intake import MESSAGES_A_TURN, Tap
from .page.status import Status, explaining_router, page_router
from .policies.registry import set_weights
from .process.process import ParentWatch, RateLimitedLog, collect_seldom, tame_memory
from .shadows.pools import OtherWeights

logger = logging.getLogger(__name__)

_AFTER_FAILURE_S: Final = 0.05  # after an error, which may recur: it must not take a core; chosen
_LONGEST_SLEEP_S: Final = 1.0  # then the configuration file and the parent are checked; chosen


class Service:
    """One sidecar; only the thread of ``run`` uses its sockets. Raises ConfigError."""

    def __init__(
        self,
        config: Config,
        *,
        path: Path | None = None,  # the configuration's file, watched for changes
        # settings of the command line; they win over the file at each reload
        overrides: Mapping[str, Any] | None = None,
        parent: int | None = None,  # process id; the sidecar exits when that process is gone
        # called with every engine's events after they were applied, on `run`'s thread
        tap: Tap | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stopping = False
        self._log = RateLimitedLog(logger, clock)
        self._parent = ParentWatch(parent) if parent is not None else None
        with ExitStack() as opened:
            if self._parent is not None:
                opened.callback(self._parent.close)
            self.parts = Sidecar(
                config, opened, path=path, overrides=overrides or {}, tap=tap, clock=clock
            )
            self.status = Status(self.parts, config.sidecar.max_stale_s, clock)
            self._http = _http_server(self.status, config.http, self.token)
            self.status.http = self._http.url
            self._opened = opened.pop_all()

    @property
    def graph(self) -> KVCacheGraph:
        return self.parts.graph

    @property
    def token(self) -> str:
        return self.parts.token

    @property
    def endpoint(self) -> str:
        return self.parts.front.endpoint

    @property
    def http(self) -> str:
        return self._http.url

    def run(self) -> None:
        """Serve until ``stop`` is called or the parent process has ended."""
        parts = self.parts
        parts.snapshots.restore()
        for part in (parts.snapshots, parts.planner, parts.shadows, parts.tracing, self._http):
            part.start()
        try:
            while not self._stopping:
                self._turn()
        finally:
            self._close()

    def stop(self) -> None:
        """Ask ``run`` to end; safe from any thread and in a signal handler."""
        self._stopping = True
        self.parts.wake.set()

    def reload(self) -> None:
        """Request that the configuration file is read again; safe in a signal handler."""
        self.parts.watch.ask()
        self.parts.wake.set()

    def _turn(self) -> None:
        self._sleep()
        steps = (self.parts.intake.receive_and_apply, self._publish, self._maintain)
        for name, step in zip(("receiving", "publishing", "maintenance"), steps, strict=True):
            try:
                step()
            except Exception as error:  # the others go on, and the next turn may go better
                self.parts.intake.counters["turns_failed"] += 1
                self._log.failed(name, f"{name} failed", error)
                time.sleep(_AFTER_FAILURE_S)

    def _sleep(self) -> None:
        poller = zmq.Poller()
        for socket in self.parts.front.sockets:
            poller.register(socket, zmq.POLLIN)
        for source in self.parts.sources:
            for socket in source.sockets:
                poller.register(socket, zmq.POLLIN)
        poller.register(self.parts.wake.fd, zmq.POLLIN)
        if self._parent is not None and self._parent.fd is not None:
            poller.register(self._parent.fd, zmq.POLLIN)
        wait_s = self.parts.intake.seconds_to_wait(_LONGEST_SLEEP_S)
        ready = dict(poller.poll(int(1000 * wait_s) + 1))
        self.parts.intake.woke()
        self.parts.wake.clear()
        self.parts.front.answer_handshakes(MESSAGES_A_TURN)
        if self._parent is not None and self._parent.is_gone(self._parent.fd in ready):
            logger.info("the engine that started this sidecar is gone")
            self._stopping = True

    def _publish(self) -> None:
        planner, peers = self.parts.planner, self.parts.subscriber.peers
        orders = planner.orders.latest
        self.parts.publisher.publish(peers, planner.latest, orders, planner.admissions)
        self.parts.publisher.give_key(peers)
        if self.parts.intake.busy.overloaded:
            self.parts.publisher.ask_for_tips(peers)

    def _maintain(self) -> None:
        self.parts.intake.forget_the_lost(self.parts.publisher.take_unreachable())
        config = self.parts.watch.poll()
        if config is not None:
            self._adopt(config)

    def _adopt(self, config: Config) -> None:
        """Apply a changed configuration; the policy keeps what it learned."""
        # The former weights go on in a shadow, so that a person sees what the change brought.
        with self.graph.lock:
            before = OtherWeights.in_force(self.graph, "the weights before the last change")
            set_weights(self.graph.policy, config.score.weights())
            self.graph.configure(config.rules(), config.graph.limits())
            self.parts.planner.orders.bounds = config.prefetch
        if before != OtherWeights.in_force(self.graph, before.said):
            self.parts.shadows.weigh_otherwise(before)

    def _close(self) -> None:
        parts = self.parts
        for part in (parts.planner, parts.shadows, self._http, parts.tracing, parts.snapshots):
            part.stop()
        self._opened.close()


def _http_server(status: Status, http: HttpConfig, token: str) -> HttpServer:
    hosts = {*LOOPBACK_HOSTS, http.host, *http.allowed_hosts}
    if http.allow_remote and not is_loopback(http.host):
        logger.warning(
            "the HTTP surface listens beyond loopback, on %s, in clear: whoever can "
            "listen on the way reads the token and the answers",
            http.host,
        )
    try:
        return HttpServer(
            create_app(
                status,
                hosts,
                token,
                explaining_router(status.page),
                partial(page_router, status.page),
            ),
            http.host,
            http.port,
        )
    except OSError as error:
        if (error.errno or 0) < 0:  # of looking up a name, which Python tells as any other
            raise ConfigError(f"http.host = {http.host!r}: {error.strerror}") from None
        raise InUseError(
            f"http.port = {http.port}: cannot listen on {http.host}: {error.strerror}"
        ) from None


def serve(
    path: Path | None, overrides: Mapping[str, Any], parent: int | None, tap: Tap | None = None
) -> None:
    """Serve until a signal, or until process ``parent`` has ended; raises ConfigError."""
    logging.basicConfig(
        level=logging.INFO, format="kvgraph sidecar %(asctime)s %(levelname)s %(message)s"
    )
    # Matrices are small here: more threads would only spin on cores that the engine needs.
    threadpool_limits(1, user_api="blas")
    tame_memory()
    if unread := unread_variables(os.environ):
        logger.warning("nothing reads these environment variables: %s", ", ".join(unread))
    path = path or config_path()
    service = Service(load(path, overrides), path=path, overrides=overrides, parent=parent, tap=tap)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: service.stop())
    signal.signal(signal.SIGHUP, lambda *_: service.reload())
    collect_seldom()
    note = leave_note(service)
    typer.echo(ready_line(service, machine=parent is not None))
    try:
        service.run()
    finally:
        if note is not None:
            note.remove()


def leave_note(service: Service) -> Note | None:
    running = RunningSidecar(os.getpid(), service.endpoint, service.http, service.token)
    try:
        return Note(running)
    except (ConfigError, OSError) as error:
        logger.warning("`kvgraph status` will not find this sidecar by itself: %s", error)
        return None


def ready_line(service: Service, *, machine: bool) -> str:
    page = page_address(service.http, service.token)
    if not machine:
        return (
            f"kvgraph is ready at {service.http}. Start engines with AITHER_KVCACHE_GRAPH=1 "
            f"AITHER_KVCACHE_SIDECAR={service.endpoint}; watch it at {page}; Ctrl-C ends it."
        )
    ready = {"ready": True, "pid": os.getpid(), "endpoint": service.endpoint, "http": service.http}
    return json.dumps({**ready, "page": page})
