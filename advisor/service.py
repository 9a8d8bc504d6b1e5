"""The sidecar's loop: receive, apply, publish, until it is told to stop."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import zmq

from ..dashboards.app import create_app
from ..dashboards.server import HttpServer
from ..graph.errors import ConfigError, GraphError
from ..graph.ipc.addresses import LOOPBACK_HOSTS, is_loopback
from ..graph.ipc.runtime import runtime_dir
from ..graph.ipc.wake import Wake
from ..graph.kvcache_graph import KVCacheGraph
from ..graph.messages.events import AnyEvent
from ..graph.messages.wire import MAX_FRAME_BYTES
from ..graph.types import MAX_ENGINES
from .config.config import Config
from .config.reload import ConfigWatch
from .config.sections import HttpConfig
from .planner import GraphEvictionAdvisor
from .policies.registry import set_weights
from .process.notices import Notices
from .process.parent import ParentWatch
from .process.snapshots import SnapshotKeeper
from .sockets import endpoints
from .sockets.door import Door
from .sockets.kv_event_source import KvEventSource
from .sockets.publisher import AdvicePublisher
from .sockets.subscriber import EventSubscriber
from .status import StatusBoard

logger = logging.getLogger(__name__)

Tap = Callable[[str, Sequence[AnyEvent]], None]

MESSAGES_A_TURN: Final = 256
TURN_S: Final = 0.25  # seconds of reading before advice goes out again; chosen
KEYS_AT_ONCE: Final = 1 << 16
_BREATH_S: Final = 1e-4  # the graph's lock is not fair: lets the planner have it while we catch up
_RCVHWM: Final = 256  # messages of an engine held for a sidecar that falls behind: three seconds
_AUDIT_EVERY_S: Final = 1.0
_AUDIT_SLACK: Final = 1024  # chosen: blocks on their way out while others are reported stored
_SNDHWM: Final = 16  # a newer ranking supersedes those that an engine has not read


class Service:
    """One sidecar. Everything that touches a socket happens in the thread that calls ``run``.

    Args:
        config: As loaded.
        path: The file that it came from, watched for changes.
        overrides: The command line's, which win over the file at each reload.
        parent: Exit when this process is gone.
        tap: Is shown every engine's events when they were applied, on ``run``'s thread.
        clock: Monotonic seconds.

    Attributes:
        token: Opens a tcp endpoint, and HTTP questions of sessions and blocks.

    Raises:
        ConfigError: An address cannot be had.
    """

    def __init__(
        self,
        config: Config,
        *,
        path: Path | None = None,
        overrides: Mapping[str, Any] | None = None,
        parent: int | None = None,
        tap: Tap | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._tap = tap
        self._interval_s = config.sidecar.interval_s
        self._stopping = False
        self._notices = Notices(logger, clock)
        self._wake = Wake()
        self._parent = ParentWatch(parent) if parent is not None else None
        self._watch = ConfigWatch(config, path, overrides or {}, clock)
        self.graph = KVCacheGraph(
            policy=config.policy.policy(config.score.weights()),
            rules=config.rules(),
            referee=config.policy.referee(),
            limits=config.graph.limits(),
            models={each.engine: each.model or each.engine for each in config.sidecar.observe},
            clock=clock,
        )
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = _router(self._context)
        self.token = config.sidecar.token or secrets.token_urlsafe(24)
        self._door: Door | None = None
        self._next_audit = clock()
        self._build(config)
        self._listen(config)

    @property
    def endpoint(self) -> str:
        """Where engines connect."""
        return self.board.endpoint

    @property
    def http(self) -> str:
        """The HTTP surface's URL."""
        return self.board.http

    def run(self) -> None:
        """Serve until ``stop`` is called or the parent is gone."""
        self._snapshots.restore()
        for part in (self._snapshots, self._planner, self.board.shadows, self._http):
            part.start()
        try:
            while not self._stopping:
                self._turn()
        finally:
            self._close()

    def stop(self) -> None:
        """Ask ``run`` to end; safe from any thread and in a signal handler."""
        self._stopping = True
        self._wake.set()

    def reload(self) -> None:
        """Ask for the configuration file to be read again; safe in a signal handler."""
        self._watch.ask()
        self._wake.set()

    def _turn(self) -> None:
        self._sleep()
        self._receive_and_apply()
        planner = self._planner
        self._publisher.publish(
            self._subscriber.peers, planner.latest, planner.wanted, planner.admissions
        )
        self._keep_house()
        self.board.last_turn = self._clock()

    def _sleep(self) -> None:
        """Sleep until something arrives, the planner has new advice, or a deadline is due."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake.fd, zmq.POLLIN)
        for source in self._sources:
            for socket in source.sockets:
                poller.register(socket, zmq.POLLIN)
        if self._door is not None:
            poller.register(self._door.socket, zmq.POLLIN)
        if self._parent is not None and self._parent.fd is not None:
            poller.register(self._parent.fd, zmq.POLLIN)
        ready = dict(poller.poll(self._patience_ms()))
        self._wake.clear()
        if self._door is not None:
            self._door.answer(MESSAGES_A_TURN)
        if self._parent is not None and self._parent.is_gone(self._parent.fd in ready):
            logger.info("the engine that started this sidecar is gone")
            self._stopping = True

    def _patience_ms(self) -> int:
        due = [self._subscriber.next_expiry(), *(source.deadline for source in self._sources)]
        soonest = min((each - self._clock() for each in due if each is not None), default=1.0)
        return int(1000 * min(max(soonest, 0.0), 1.0)) + 1

    def _receive_and_apply(self) -> None:
        for engine, events in _joined(self._subscriber.receive(MESSAGES_A_TURN, TURN_S)):
            if not self._apply(engine, events):
                self._subscriber.lose(engine)
            time.sleep(_BREATH_S)
        for source in self._sources:
            for observed in source.receive(MESSAGES_A_TURN):
                if observed is None:
                    self._forget(source.engine)
                else:
                    self._apply(source.engine, observed)

    def _apply(self, engine: str, events: list[AnyEvent]) -> bool:
        """Apply ``events``; returns whether the graph took them. A refusal is counted and costs a
        resync."""
        try:
            with self.graph.lock:
                self.graph.apply(engine, events)
            self._planner.applied()
            if self._tap is not None:
                self._tap(engine, events)
            return True
        except GraphError as error:
            self.board.loop_counters["apply_refused"] += 1
            self._notices.warn("refused", "events were refused: %s", error)
        except Exception as error:
            self.board.loop_counters["apply_failed"] += 1
            self._notices.warn("failed", "events could not be applied (%s)", type(error).__name__)
            logger.debug("events could not be applied", exc_info=True)
        return False

    def _forget(self, engine: str) -> None:
        with self.graph.lock:
            self.graph.forget_engine(engine)

    def _keep_house(self) -> None:
        lost = self._subscriber.hang_up(self._publisher.take_unreachable())
        for engine in (*lost, *self._subscriber.expire()):
            self._forget(engine)
        self._audit()
        config = self._watch.poll()
        if config is not None:
            self._adopt(config)

    def _audit(self) -> None:
        """Check once a second that no engine holds more blocks than its pool has."""
        now = self._clock()
        if now < self._next_audit:
            return
        self._next_audit = now + _AUDIT_EVERY_S
        for peer in self._subscriber.peers:
            with self.graph.lock:
                held = self.graph.resident_count(peer.engine)
            name, most = peer.hello.engine, peer.hello.num_blocks
            if held > most + _AUDIT_SLACK:
                self.board.loop_counters["engines_overfull"] += 1
                self._notices.warn(
                    "overfull", "engine %r lists %d blocks of %d: forgotten", name, held, most
                )
                self._forget(peer.engine)
                self._subscriber.lose(peer.engine)

    def _adopt(self, config: Config) -> None:
        """Take new weights and bounds, each by one assignment."""
        with self.graph.lock:
            set_weights(self.graph.policy, config.score.weights())
            self.graph.configure(config.rules(), config.graph.limits())
            self._planner.prefetch = config.prefetch

    def _ranked_engines(self) -> list[str]:
        return [peer.engine for peer in self._subscriber.peers if peer.synced]

    def _build(self, config: Config) -> None:
        sidecar, clock = config.sidecar, self._clock
        self._publisher = AdvicePublisher(self._socket, clock)
        self._subscriber = EventSubscriber(
            self._socket,
            self._publisher.request_resync,
            self._publisher.refuse,
            clock,
            engine_timeout_s=sidecar.engine_timeout_s,
            capacity=MAX_ENGINES - len(sidecar.observe),
        )
        self._sources = [KvEventSource(self._context, each, clock) for each in sidecar.observe]
        self._planner = GraphEvictionAdvisor(
            self.graph,
            self._ranked_engines,
            interval_s=sidecar.interval_s,
            max_ranked=sidecar.max_ranked,
            prefetch=config.prefetch,
            clock=clock,
            wake=self._wake.set,
        )
        self._snapshots = SnapshotKeeper(
            self.graph, sidecar.snapshot_path, sidecar.snapshot_interval_s, clock
        )
        self.board = StatusBoard(
            self.graph,
            self._subscriber,
            self._sources,
            self._planner,
            self._publisher,
            self._snapshots,
            self._watch,
            max_stale_s=sidecar.max_stale_s,
            clock=clock,
        )

    def _listen(self, config: Config) -> None:
        """Bind both surfaces, or close everything again."""
        try:
            endpoint = config.sidecar.endpoint or f"ipc://{runtime_dir()}/sidecar.sock"
            if endpoint.startswith("tcp://"):
                self._door = Door(self._context, self.token)
                self._door.guard(self._socket)
            self.board.endpoint = endpoints.bind(self._socket, endpoint)
            self._http = _http_server(self.board, config.http, self.token)
            self.board.http = self._http.url
        except BaseException:
            self._close_sockets()
            raise

    def _close(self) -> None:
        for part in (self._planner, self.board.shadows, self._http, self._snapshots):
            part.stop()
        self._close_sockets()

    def _close_sockets(self) -> None:
        for source in self._sources:
            source.close()
        self._socket.close(linger=0)
        if self._door is not None:
            self._door.close()
        self._context.term()
        if self.board.endpoint:
            endpoints.unlink(self.board.endpoint)
        if self._parent is not None:
            self._parent.close()
        self._wake.close()


def _joined(
    batches: Iterable[tuple[str, list[AnyEvent]]],
) -> Iterator[tuple[str, list[AnyEvent]]]:
    """Consecutive batches of one engine, joined: the graph applies longer runs at less cost.

    At most ``KEYS_AT_ONCE`` keys: while they are applied, no ranking is made.
    """
    speaker, run, keys = "", list[AnyEvent](), 0
    for engine, events in batches:
        if run and (engine != speaker or keys >= KEYS_AT_ONCE):
            yield speaker, run
            run, keys = [], 0
        speaker = engine
        run += events
        keys += sum(len(getattr(event, "hashes", b"")) for event in events) // 8
    if run:
        yield speaker, run


def _router(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, _RCVHWM)
    socket.setsockopt(zmq.SNDHWM, _SNDHWM)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an engine that is gone is an error, not silence
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a reconnecting engine takes its place at once
    return socket


def _http_server(board: StatusBoard, http: HttpConfig, token: str) -> HttpServer:
    hosts = {*LOOPBACK_HOSTS, http.host, *http.allowed_hosts}
    if http.allow_remote and not is_loopback(http.host):
        logger.warning("the HTTP surface listens beyond loopback, on %s, in clear: whoever can "
                       "listen on the way reads the token and the answers", http.host)  # fmt: skip
    try:
        return HttpServer(create_app(board, hosts, token), http.host, http.port)
    except OSError as error:
        raise ConfigError(
            f"http.port = {http.port}: cannot listen on {http.host}: {error.strerror}"
        ) from None
