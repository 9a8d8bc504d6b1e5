"""vLLM's KV-event protocol with ways to get it wrong, and a reader of what a source makes of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq
from kvgraph.advisor.config.sections import ObserveConfig
from kvgraph.advisor.sockets.kv_events import KvEventSource
from kvgraph.advisor.sockets.kv_order import REPLAY_TIMEOUT_S
from kvgraph.graph.wire.events import AnyEvent, BlocksCleared, BlocksRemoved, BlocksStored

END = (-1).to_bytes(8, "big", signed=True)


def stored(*keys: int) -> dict[str, Any]:
    """vLLM's event of blocks that were cached."""
    return {
        "type": "BlockStored",
        "block_hashes": list(keys),
        "parent_block_hash": None,
        "token_ids": [1, 2, 3],
        "block_size": 16,
    }


def removed(*keys: int) -> dict[str, Any]:
    """vLLM's event of blocks that are gone."""
    return {"type": "BlockRemoved", "block_hashes": list(keys)}


class Publisher:
    """vLLM's protocol, and ways to get it wrong.

    Attributes:
        mute: Numbers that never leave the PUB socket.
        holes: Numbers that a replay leaves out, each for the given number of times.
        answers: Whether replay requests are served at all.
        ends: Whether a replay says that it is over.
        late_s: How long a replay is in coming.
        forgets_before: The first number that a replay still has.
        topic: Of what it publishes; None: a replay leaves the frame out, as older ones do.
        requests: Replays that were asked for.
    """

    def __init__(self, directory: Path, *, replay: bool = True) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.endpoint = f"ipc://{directory}/pub"
        self.replay_endpoint = f"ipc://{directory}/replay" if replay else None
        self.mute: set[int] = set()
        self.holes: dict[int, int] = {}
        self.answers = self.ends = True
        self.late_s = 0.0
        self.requests = 0
        self.forgets_before = 0
        self.topic: bytes | None = b""
        self._thread: threading.Thread | None = None
        self.start()

    def start(self) -> None:
        """Come up as a new process would: from batch 0, remembering nothing."""
        self.seq = 0
        self.buffer: list[tuple[int, bytes]] = []
        self.pub = self.context.socket(zmq.XPUB)
        self.pub.bind(self.endpoint)
        self._stop = threading.Event()
        if self.replay_endpoint:
            self._router = self.context.socket(zmq.ROUTER)
            self._router.bind(self.replay_endpoint)
            self._thread = threading.Thread(target=self._serve)
            self._thread.start()

    def kill(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._router.close(linger=0)
        self.pub.close(linger=0)

    def close(self) -> None:
        self.kill()
        self.context.term()

    def wait_for_subscriber(self) -> None:
        assert self.pub.poll(10_000), "nobody subscribed"
        self.pub.recv()

    def publish(self, *events: dict[str, Any]) -> int:
        return self.publish_raw(msgspec.msgpack.encode([time.time(), list(events), 0]))

    def publish_raw(self, payload: bytes) -> int:
        """Publish a batch, whether or not it can be read; returns its number."""
        seq, self.seq = self.seq, self.seq + 1
        self.buffer.append((seq, payload))
        if seq not in self.mute:
            self.send(seq, payload)
        return seq

    def send(self, seq: int, payload: bytes) -> None:
        self.pub.send_multipart([self.topic or b"", seq.to_bytes(8, "big"), payload])

    def _serve(self) -> None:
        while not self._stop.is_set():
            if not self._router.poll(20):
                continue
            client, _, first = self._router.recv_multipart()
            self.requests += 1
            if self.answers:
                self._stop.wait(self.late_s)
                self._replay(client, int.from_bytes(first, "big"))

    def _replay(self, client: bytes, first: int) -> None:
        head = [client, b""] if self.topic is None else [client, b"", self.topic]
        for seq, payload in list(self.buffer):
            if seq < max(first, self.forgets_before):
                continue
            if self.holes.get(seq, 0) > 0:
                self.holes[seq] -= 1
                continue
            self._router.send_multipart([*head, seq.to_bytes(8, "big"), payload])
        if self.ends:
            self._router.send_multipart([*head, END, b""])


class Watcher:
    """A source, and the blocks that its events leave; ``events`` in order; None: forget all."""

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None,
        replay_timeout_s: float = REPLAY_TIMEOUT_S,
        topic: str = "",
    ) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        config = ObserveConfig(endpoint=endpoint, replay_endpoint=replay_endpoint, topic=topic)
        self.source = KvEventSource(self.context, config, time.monotonic, replay_timeout_s)
        self.blocks: set[int] = set()
        self.events: list[AnyEvent | None] = []
        self.forgotten = 0

    @classmethod
    def of(cls, publisher: Publisher, replay_timeout_s: float = REPLAY_TIMEOUT_S) -> Watcher:
        return cls(publisher.endpoint, publisher.replay_endpoint, replay_timeout_s)

    def step(self) -> None:
        for observed in self.source.receive(100):
            if observed is None:
                self.forgotten += 1
                self.blocks.clear()
                self.events.append(None)
                continue
            for event in observed:
                self._apply(event)
                self.events.append(event)

    def until(self, condition: Callable[[], bool], seconds: float = 20.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, (self.source.state, self.blocks)
            self.step()
            time.sleep(0.002)

    def settled(self) -> bool:
        """Whether no gap is being filled."""
        return self.source.state in ("synced", "partial", "degraded")

    def close(self) -> None:
        self.source.close()
        self.context.term()

    def _apply(self, event: AnyEvent) -> None:
        match event:
            case BlocksStored():
                self.blocks |= set(memoryview(event.hashes).cast("Q"))
            case BlocksRemoved():
                self.blocks -= set(memoryview(event.hashes).cast("Q"))
            case BlocksCleared():
                self.blocks.clear()
            case _:
                raise AssertionError(event)
