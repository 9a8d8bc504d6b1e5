"""Faults at random, one on top of another, and calm between them: in calm all has to be well again.

What may happen to a sidecar: it is killed, stopped, left without its disk, connected to by who says
nothing; its engines reset, restart, lose what they send. The engine's memory is the oracle.
"""

from __future__ import annotations

import random
import socket
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import zmq
from kvgraph.graph.wire.events import AnyEvent
from kvgraph.hooks.fake import FakeEngine
from kvgraph.hooks.link.client import AdvisorClient, ClientOptions
from kvgraph.hooks.link.outbox import Outbox

from ..figures import Figures
from ..sidecars.sidecar_process import SidecarProcess, wait_until
from .faults import Say, Size
from .faults_engines import EngineProcess

_FULL: Final = 0.9  # of the pool; chosen
_POOL: Final = 300
_OPTIONS: Final = ClientOptions(tick_s=0.05, absent_s=0.3)
_AT_ONCE: Final = 3  # faults of a round, at most
_CALM_S: Final = 30.0  # in which it has to be in step
_SILENT: Final = 40


class _LossyOutbox(Outbox):
    """Loses a share of what it sends."""

    losing = 0.0
    rng = random.Random()

    def send(self, socket: zmq.Socket[bytes], events: list[AnyEvent]) -> bool:
        if self.rng.random() < self.losing:
            self.frames(events)
            return True
        return super().send(socket, events)


class Chaos:
    """One sidecar, a watched engine, and others; ``back``: seconds until in step, None: never."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.happened: Counter[str] = Counter()
        self.back: list[float | None] = []
        self._rng = random.Random(seed)
        self._kept = directory / "kept"
        self._sidecar = SidecarProcess(
            directory,
            sidecar__snapshot_path=self._kept / "graph.snap",
            sidecar__snapshot_interval_s=0.5,
        )
        self._stack = ExitStack()
        self._stopped = False

    def play(self, rounds: int, say: Say) -> None:
        with self._stack as stack, self._sidecar:
            self._engine = FakeEngine(self._sidecar.endpoint, num_blocks=_POOL)
            self._client = AdvisorClient(self._sidecar.endpoint, self._engine, _OPTIONS)
            self._outbox = _LossyOutbox(_OPTIONS.queue_limit, _OPTIONS.batch_limit)
            self._outbox.rng = random.Random(self._rng.random())  # on a thread of its own
            self._client.outbox = self._outbox
            self._engine.client = self._client
            stack.enter_context(self._engine)
            for number in range(rounds):
                say(f"round {number + 1} of {rounds}: {dict(self.happened)}")
                for _ in range(self._rng.randint(1, _AT_ONCE)):
                    self._happen()
                self._calm()

    def _happen(self) -> None:
        faults = (
            self._kill, self._stop, self._lose, self._reset, self._newcomer, self._silence,
            self._disk,
        )  # fmt: skip
        fault = self._rng.choice(faults)
        self.happened[fault.__name__.strip("_")] += 1
        fault()
        self._serve(self._rng.uniform(0.0, 1.5))

    def _serve(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            length = 16 * self._rng.randint(1, 9)
            self._engine.run([*range(32), *(self._rng.randrange(50_000) for _ in range(length))])
            time.sleep(0.005)

    def _calm(self) -> None:
        self._outbox.losing = 0.0
        if self._stopped:
            self._sidecar.go_on()
            self._stopped = False
        self._fill()
        started = time.monotonic()
        well = wait_until(self._is_in_step, _CALM_S)
        self.back.append(time.monotonic() - started if well else None)

    def _fill(self) -> None:
        """Leave few blanks: an engine with many evicts nothing for long, and gets no ranking."""
        while len(self._engine.cached) < _FULL * _POOL:
            self._serve(0.02)

    def _is_in_step(self) -> bool:
        ranking = self._engine.client.ranking()
        if ranking is None:
            return False
        return {*ranking.order.tolist(), *ranking.protected.tolist()} == self._engine.cached

    # Faults -------------------------------------------------------------------------------------

    def _kill(self) -> None:
        self._stopped = False
        self._sidecar.kill()
        self._serve(self._rng.uniform(0.0, 1.0))
        self._sidecar.start()

    def _stop(self) -> None:
        self._sidecar.stop()
        self._stopped = True

    def _lose(self) -> None:
        self._outbox.losing = self._rng.choice((0.01, 0.1, 0.5))

    def _reset(self) -> None:
        self._engine.reset()

    def _newcomer(self) -> None:
        if self._stopped:
            return  # it would wait for a greeting
        other = EngineProcess(self._sidecar.endpoint, self._rng.randrange(1000))
        self._serve(self._rng.uniform(0.0, 0.5))
        other.kill()

    def _silence(self) -> None:
        host, _, port = self._sidecar.http.removeprefix("http://").partition(":")
        for _ in range(_SILENT):
            line = self._stack.enter_context(socket.socket())
            line.setblocking(False)
            line.connect_ex((host, int(port)))

    def _disk(self) -> None:
        """A file takes the place of its directory, or gives it back."""
        if self._kept.is_file():
            self._kept.unlink()
        elif self._kept.exists():
            self._kept.rename(self._kept.with_name(f"gone-{self._rng.randrange(1 << 30)}"))
            self._kept.touch()


def run(figures: Figures, size: Size, say: Say) -> None:
    chaos = Chaos(size.folder, size.seed)
    chaos.play(size.of(15, 200), say)
    back = [seconds for seconds in chaos.back if seconds is not None]
    figures.add("chaos_faults", sum(chaos.happened.values()), "")
    figures.add("chaos_never_in_step", len(chaos.back) - len(back), f"of {len(chaos.back)}", "0")
    figures.add("chaos_back_max_s", max(back, default=_CALM_S), "s", "≤ 5")
