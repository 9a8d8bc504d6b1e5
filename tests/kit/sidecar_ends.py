"""Both ends of a sidecar's socket in this process: a service in a thread, and engines by hand."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import zmq
from kvgraph.advisor.config.config import load
from kvgraph.advisor.service import Service
from kvgraph.graph.wire import frames as wire
from kvgraph.graph.wire.advice import AnyAdvice
from kvgraph.graph.wire.events import AnyEvent, BlocksResident, EngineHello
from wire_keys import pack


class Serving:
    """A service that runs in a thread until ``stop``; ``__`` in settings' names is a dot."""

    def __init__(self, endpoint: str, path: Path | None = None, **settings: Any) -> None:
        overrides = {"sidecar.endpoint": endpoint, "sidecar.interval_s": 0.05}
        overrides |= {key.replace("__", "."): value for key, value in settings.items()}
        self.service = Service(load(path, overrides), path=path, overrides=overrides)
        self._thread = threading.Thread(target=self.service.run)
        self._thread.start()

    def stop(self) -> None:
        self.service.stop()
        self._thread.join(timeout=20)
        assert not self._thread.is_alive()


class Dealer:
    """An engine's socket and nothing behind it; ``token`` is a password, and None of no engine."""

    def __init__(
        self, context: zmq.Context[Any], endpoint: str, name: str = "engine",
        token: bytes | None = None, queue: int = 1000,
    ) -> None:  # fmt: skip
        self.name, self.identity, self.seq = name, os.urandom(16), 0
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, self.identity)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVHWM, queue)
        if token is not None:
            self.socket.setsockopt(zmq.PLAIN_USERNAME, b"engine")
            self.socket.setsockopt(zmq.PLAIN_PASSWORD, token)
        self.socket.connect(endpoint)

    def send(self, *events: AnyEvent, seq: int | None = None) -> None:
        """A batch with the next number, or with ``seq``."""
        number = self.seq if seq is None else seq
        self.socket.send_multipart(wire.encode_events(number, list(events)))
        self.seq = number + 1

    def greet(self, keys: Iterable[int] = (), blocks: int = 100, seq: int | None = None) -> None:
        """Say hello, and which blocks it holds."""
        hello = EngineHello(self.name, "model", 16, blocks, "test 1")
        self.send(hello, BlocksResident(pack(*keys)), seq=seq)

    def read(self, now: float = 0.0) -> AnyAdvice:
        assert self.socket.poll(5000), "no advice arrived"
        return wire.decode_advice(self.socket.recv_multipart(), now=now)[1]

    def close(self) -> None:
        self.socket.close(linger=0)
