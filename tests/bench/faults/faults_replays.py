"""KV events that are lost, replayed badly, repeated or disordered: what is made of them.

The publisher speaks vLLM's protocol and keeps to its numbers; what it replays is short, late,
without an end or full of holes. The oracle is the set of blocks that its true log leaves.
"""

from __future__ import annotations

import functools
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final

from kvgraph.advisor.sockets.kv_order import MAX_ATTEMPTS
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.snapshot import save

from ..figures import Figures
from ..sidecars.kv_publisher import Publisher, Watcher, removed, stored
from .faults import Say, Size

_BATCHES: Final = 60  # of a round
_KEYS: Final = 200
_REPLAY_TIMEOUT_S: Final = 0.1  # of the source here, so that many rounds fit
_SETTLED_S: Final = 20.0


class TrueLog:
    """What an engine did, and what that leaves in its cache."""

    def __init__(self, rng: random.Random) -> None:
        self.cached: set[int] = set()
        self._rng = rng

    def batch(self) -> list[dict[str, Any]]:
        rng, events = self._rng, []
        for _ in range(rng.randrange(1, 4)):
            if self.cached and rng.random() < 0.4:
                gone = rng.sample(sorted(self.cached), rng.randrange(1, 1 + len(self.cached)) // 2)
                self.cached.difference_update(gone)
                events.append(removed(*gone))
            else:
                new = {rng.randrange(1, _KEYS) for _ in range(rng.randrange(1, 9))} - self.cached
                self.cached |= new
                events.append(stored(*sorted(new)))
        return events


@contextmanager
def watched(directory: Path) -> Iterator[tuple[Publisher, Watcher]]:
    with (
        closing(Publisher(directory)) as publisher,
        closing(Watcher.of(publisher, _REPLAY_TIMEOUT_S)) as watcher,
    ):
        watcher.until(lambda: watcher.source.state == "synced")
        publisher.wait_for_subscriber()
        yield publisher, watcher


def _short(publisher: Publisher, rng: random.Random) -> None:
    publisher.forgets_before = rng.randrange(1, _BATCHES)


def _late(publisher: Publisher, rng: random.Random) -> None:
    publisher.late_s = _REPLAY_TIMEOUT_S * rng.choice((0.5, 1.5, 2.5))


def _endless(publisher: Publisher, rng: random.Random) -> None:
    publisher.ends = False


def _holed(publisher: Publisher, rng: random.Random) -> None:
    publisher.holes = {seq: rng.choice((1, 3, 100)) for seq in publisher.mute if rng.random() < 0.5}


def _silent(publisher: Publisher, rng: random.Random) -> None:
    publisher.answers = False


def _well(publisher: Publisher, rng: random.Random) -> None:
    return


WAYS: Final[dict[str, Callable[[Publisher, random.Random], None]]] = {
    "short": _short, "late": _late, "without an end": _endless, "with holes": _holed,
    "never": _silent, "well": _well,
}  # fmt: skip
"""How a replay goes."""


def replay(directory: Path, way: str, rng: random.Random) -> tuple[bool, bool, int]:
    """One round: is the picture right, or said to be wrong; attempts a gap, their mean."""
    with watched(directory) as (publisher, watcher):
        log = TrueLog(rng)
        publisher.mute = {seq for seq in range(1, _BATCHES) if rng.random() < 0.15}
        WAYS[way](publisher, rng)
        before = publisher.requests
        for _ in range(_BATCHES):
            publisher.publish(*log.batch())
            if rng.random() < 0.3:
                watcher.step()
        publisher.publish()  # shows what was lost just before it
        watcher.until(lambda: _is_through(publisher, watcher), _SETTLED_S)
        visible = watcher.source.state != "synced"
        # What is known of an engine that is not followed whole is at least true.
        right = watcher.blocks == log.cached or (visible and watcher.blocks <= log.cached)
        gaps = max(1, watcher.source.counters["kv_gaps"])
        return right, visible, -(-(publisher.requests - before) // gaps)


def _is_through(publisher: Publisher, watcher: Watcher) -> bool:
    return watcher.settled() and (watcher.source.sequence.expected or 0) >= publisher.seq


def absent_after_a_late_replay(directory: Path) -> bool:
    """Stored in a batch that was lost, removed in one that was not: it has to be gone."""
    with watched(directory) as (publisher, watcher):
        publisher.mute, publisher.late_s = {1}, 0.5 * _REPLAY_TIMEOUT_S
        publisher.publish(stored(1))
        publisher.publish(stored(7))
        publisher.publish(removed(7), stored(2))
        watcher.until(lambda: _is_through(publisher, watcher), _SETTLED_S)
        return watcher.blocks == {1, 2}


def is_the_same_when_repeated(directory: Path, rng: random.Random) -> bool:
    """Whether batches sent again, late and in any order leave the same graph, byte for byte."""
    with watched(directory) as (publisher, watcher):
        log, batches = TrueLog(rng), []
        for _ in range(_BATCHES):
            batches.append(log.batch())
            publisher.publish(*batches[-1])
            for seq, payload in rng.choices(publisher.buffer, k=rng.randrange(3)):
                publisher.send(seq, payload)
        watcher.until(lambda: _is_through(publisher, watcher), _SETTLED_S)
        disturbed = _bytes_of(watcher, directory)
    with watched(directory) as (publisher, watcher):
        for batch in batches:
            publisher.publish(*batch)
        watcher.until(lambda: _is_through(publisher, watcher), _SETTLED_S)
        return _bytes_of(watcher, directory) == disturbed


def _bytes_of(watcher: Watcher, directory: Path) -> bytes:
    graph = KVCacheGraph(clock=lambda: 1000.0)
    graph.apply("e", [event for event in watcher.events if event is not None])
    path = directory / "graph.snap"
    save(graph, path)
    return path.read_bytes()


def run_replays(figures: Figures, size: Size, say: Say) -> None:
    rng, rounds = random.Random(size.seed), size.of(20, 100)
    wrong = silent = most = 0
    for way in WAYS:
        say(f"a replay that comes {way}")
        for _ in range(rounds):
            once = functools.partial(replay, way=way, rng=rng)
            right, visible, attempts = _in_a_folder(once)
            wrong += not right
            silent += way == "never" and not visible
            most = max(most, attempts)
    figures.add("replay_rounds", rounds * len(WAYS), "")
    figures.add("replay_wrong_pictures", wrong, "", "0")
    figures.add("replay_losses_not_said", silent, "", "0")
    figures.add("replay_attempts_a_gap", most, "the mean of a round", f"≤ {MAX_ATTEMPTS}")


def run_late(figures: Figures, size: Size, say: Say) -> None:
    times = size.of(10, 50)
    present = sum(not _in_a_folder(absent_after_a_late_replay) for _ in range(times))
    figures.add("late_ghosts", present, f"of {times}", "0")


def run_repeats(figures: Figures, size: Size, say: Say) -> None:
    rng, times = random.Random(size.seed), size.of(10, 50)
    once = functools.partial(is_the_same_when_repeated, rng=rng)
    other = sum(not _in_a_folder(once) for _ in range(times))
    figures.add("repeats_not_byte_equal", other, f"of {times}", "0")


def _in_a_folder(what: Callable[[Path], Any]) -> Any:
    with tempfile.TemporaryDirectory(prefix="kvg-") as folder:
        return what(Path(folder))
