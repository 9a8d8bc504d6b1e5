"""What must hold when things go wrong: the sidecar's picture against the engine's own memory."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvgraph.advisor.config.config import load
from kvgraph.advisor.service import Service
from kvgraph.advisor.sockets.subscriber import engine_id
from kvgraph.graph.types import SourceLayer
from kvgraph.graph.wire.events import Segment
from kvgraph.hooks.fake import FakeEngine
from kvgraph.hooks.link.client import ClientOptions
from kvgraph.hooks.link.outbox import Outbox
from kvgraph_bench.sidecars.sidecar_process import SidecarProcess
from waiting import until

QUICK = ClientOptions(tick_s=0.01, heartbeat_s=0.1, resync_gap_s=0.05)


class InProcess:
    """A service in a thread, whose graph can be looked into."""

    def __init__(self, endpoint: str, **settings: Any) -> None:
        overrides = {"sidecar.endpoint": endpoint, "sidecar.interval_s": 0.05}
        overrides |= {f"sidecar.{key}": value for key, value in settings.items()}
        self.service = Service(load(overrides=overrides), overrides=overrides)
        self._thread = threading.Thread(target=self.service.run)
        self._thread.start()

    def resident(self, engine: FakeEngine) -> set[int] | None:
        """The keys that the graph holds resident; None while the engine is not in step."""
        identity = engine_id(engine.client.identity)
        peers = {peer.engine: peer for peer in self.service.parts.subscriber.peers}
        if identity not in peers or not peers[identity].synced:
            return None
        graph = self.service.graph
        with graph.lock:
            blocks = graph.tables.blocks
            rows = blocks.resident(graph.tables.engines[identity])
            return set(blocks.wire_keys(blocks.pick(rows).rows).tolist())

    def agrees_with(self, engine: FakeEngine) -> bool:
        return self.resident(engine) == engine.cached

    def check(self) -> None:
        with self.service.graph.lock:
            self.service.graph.check_integrity()

    def stop(self) -> None:
        self.service.stop()
        self._thread.join(timeout=20)


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/s"


@pytest.fixture
def sidecar(endpoint: str) -> Iterator[InProcess]:
    sidecar = InProcess(endpoint)
    yield sidecar
    sidecar.stop()


def prompts(seed: int, count: int) -> Iterator[tuple[list[int], str]]:
    """Turns of a few sessions that share their beginning: prompt and session."""
    rng = random.Random(seed)
    histories: dict[str, list[int]] = {}
    for _ in range(count):
        session = f"s{rng.randrange(6)}"
        history = histories.setdefault(session, list(range(32)))
        if len(history) > 16 * 12:
            history = histories[session] = list(range(32))
        history += [rng.randrange(1000) for _ in range(16 * rng.randint(1, 3))]
        yield list(history), session


def serve(engine: FakeEngine, seed: int, count: int, pause_s: float = 0.002) -> None:
    for tokens, session in prompts(seed, count):
        engine.run(tokens, session)
        time.sleep(pause_s)


def is_advised(engine: FakeEngine) -> bool:
    """Whether the engine holds a fresh ranking of all that it caches."""
    ranking = engine.client.ranking()
    return (
        ranking is not None
        and {
            *ranking.order.tolist(),
            *ranking.protected.tolist(),
        }
        == engine.cached
    )


def test_the_picture_equals_the_engines_memory(sidecar: InProcess, endpoint: str) -> None:
    seed = random.randrange(1 << 30)
    with FakeEngine(endpoint, num_blocks=40, options=QUICK) as engine:
        serve(engine, seed, 200)
        until(lambda: sidecar.agrees_with(engine), f"seed {seed}")
        assert engine.evicted
        engine.reset()
        until(lambda: sidecar.agrees_with(engine), f"seed {seed}, after a reset")
    sidecar.check()


def test_protected_blocks_survive_pressure(sidecar: InProcess, endpoint: str) -> None:
    rules = (Segment(int(SourceLayer.RULES), 0, 64),)
    with FakeEngine(endpoint, num_blocks=24, options=QUICK) as engine:
        precious = list(range(64))
        engine.run(precious, "boss", segments=rules)
        kept = engine.keys(precious)
        for salt in range(30):
            filler = [5000 + salt, *range(16 * 6 - 1)]
            until(lambda: is_advised(engine), "a ranking that knows everything")
            engine.run(filler, f"filler-{salt}")
        assert set(kept) <= engine.cached
        stock = FakeEngine("ipc:///nowhere", num_blocks=24)
        stock.run(precious)
        for salt in range(30):
            stock.run([5000 + salt, *range(16 * 6 - 1)])
        assert not set(kept) & stock.cached, "without advice they are lost"


@pytest.mark.parametrize("share", [0.01, 0.1])
def test_lost_batches_are_noticed_and_made_good(
    sidecar: InProcess, endpoint: str, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    send, lost = Outbox.send, []

    def lossy(outbox: Outbox, socket: Any, events: list[Any]) -> bool:
        if rng.random() < share:
            outbox.frames(events)  # its number is used, and nobody hears it
            lost.append(len(events))
            return True
        return send(outbox, socket, events)

    with FakeEngine(endpoint, num_blocks=40, options=QUICK) as engine:
        with monkeypatch.context() as broken:
            broken.setattr(Outbox, "send", lossy)
            serve(engine, seed, 300)
        # The number after the last loss shows it.
        until(lambda: sidecar.agrees_with(engine), f"seed {seed}")
        if lost:
            assert sidecar.service.parts.subscriber.counters["resyncs"] > 0
    sidecar.check()


def test_a_restarted_engine_leaves_nothing_behind(sidecar: InProcess, endpoint: str) -> None:
    for generation in range(5):
        with FakeEngine(endpoint, num_blocks=40, options=QUICK) as engine:
            serve(engine, generation, 20, pause_s=0)
            until(lambda: sidecar.agrees_with(engine), f"generation {generation}")
    until(lambda: not sidecar.service.graph.engines, "the last one is forgotten too")
    sidecar.check()


def test_an_engine_that_is_gone_does_not_cost_the_other_its_advice(
    sidecar: InProcess, endpoint: str
) -> None:
    with FakeEngine(endpoint, options=QUICK, name="other") as other:
        with FakeEngine(endpoint, options=QUICK, name="gone") as gone:
            serve(other, 1, 10)
            serve(gone, 2, 10)
            until(lambda: gone.client.ranking() is not None, "advice for both")
        advice = sidecar.service.parts.publisher.counters
        until(lambda: advice["dropped_unreachable"] > 0, "noticed")
        serve(other, 3, 10)
        until(lambda: sidecar.agrees_with(other), "the other is followed")
        ranking = other.client.ranking()
        assert ranking is not None
        assert set(ranking.order.tolist()) <= other.cached


@pytest.mark.timing
def test_a_killed_sidecar_is_back_in_step_after_each_restart(socket_directory: Path) -> None:
    sidecar = SidecarProcess(socket_directory, sidecar__interval_s=0.05)
    took, started = list[float](), 0.0
    with sidecar, FakeEngine(sidecar.endpoint, num_blocks=40, options=QUICK) as engine:
        for generation in range(8):
            serve(engine, generation, 50)
            until(lambda: is_advised(engine), f"generation {generation}")
            if generation:
                took.append(time.monotonic() - started)
            sidecar.kill()
            serve(engine, generation, 50)  # nobody listens: it goes on
            until(lambda: engine.client.ranking() is None, "old advice is let go")
            started = time.monotonic()
            sidecar.start()
    assert float(np.median(took)) < 5, "seconds until it advises again"


def test_a_stopped_sidecar_is_done_without_and_taken_up_again(socket_directory: Path) -> None:
    sidecar = SidecarProcess(socket_directory, sidecar__interval_s=0.05)
    with sidecar, FakeEngine(sidecar.endpoint, num_blocks=40, options=QUICK) as engine:
        serve(engine, 1, 30)
        until(lambda: is_advised(engine), "advised")
        sidecar.stop()
        until(lambda: engine.client.ranking() is None, "stale advice is not used")
        serve(engine, 2, 300)
        sidecar.go_on()
        until(lambda: is_advised(engine), "advised again")
