"""Watching an engine through vLLM's own KV-event publisher: order, gaps, replay, restarts."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import msgspec
import pytest
from kvgraph.advisor.intake import Intake
from kvgraph.advisor.sockets.kv_order import MAX_ATTEMPTS, KvOrder, SourceState
from kvgraph_bench.sidecars.kv_publisher import Publisher, Watcher, removed, stored

Watch = Callable[..., Watcher]
QUICK_S = 0.1  # an attempt ends when nothing came for so long


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[Publisher]:
    publisher = Publisher(tmp_path)
    yield publisher
    publisher.close()


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Watch]:
    """Begins to watch a publisher; all are closed after the test."""
    with ExitStack() as stack:

        def begin(publisher: Publisher, **more: Any) -> Watcher:
            where = (publisher.endpoint, publisher.replay_endpoint)
            return stack.enter_context(closing(Watcher(*where, QUICK_S, **more)))

        yield begin


def followed(watch: Watch, publisher: Publisher, **more: Any) -> Watcher:
    """What it publishes from now on is heard."""
    watcher = watch(publisher, **more)
    watcher.until(lambda: watcher.source.state == "synced")
    publisher.wait_for_subscriber()
    return watcher


@pytest.fixture
def watcher(publisher: Publisher, watch: Watch) -> Watcher:
    return followed(watch, publisher)


def test_events_are_applied_in_order(publisher: Publisher, watcher: Watcher) -> None:
    publisher.publish(stored(1, 2, 3))
    publisher.publish(removed(2), stored(4))
    watcher.until(lambda: watcher.blocks == {1, 3, 4})
    assert watcher.source.sequence.gaps == 0


def test_what_happened_before_we_came_is_replayed(publisher: Publisher, watch: Watch) -> None:
    publisher.publish(stored(1, 2))
    publisher.publish(removed(1))
    watcher = watch(publisher)
    watcher.until(lambda: watcher.blocks == {2} and watcher.settled())
    assert watcher.source.state == "synced"


def test_a_beginning_that_the_publisher_forgot_leaves_a_partial_picture(
    publisher: Publisher, watch: Watch
) -> None:
    for key in range(5):
        publisher.publish(stored(key))
    publisher.forgets_before = 3
    watcher = watch(publisher)
    watcher.until(lambda: watcher.blocks == {3, 4} and watcher.settled())
    assert watcher.source.state == "partial"


def test_a_gap_is_replayed_in_order(publisher: Publisher, watcher: Watcher) -> None:
    """A block stored in a lost batch and removed in a live one must end up absent."""
    publisher.mute = {1}
    publisher.publish(stored(1))
    publisher.publish(stored(7))
    publisher.publish(removed(7), stored(2))
    watcher.until(lambda: watcher.blocks == {1, 2})
    assert watcher.source.state == "synced"
    assert watcher.source.sequence.gaps == 1
    assert watcher.forgotten == 0


def test_a_replay_with_holes_is_asked_for_again(publisher: Publisher, watcher: Watcher) -> None:
    publisher.mute = {1, 2, 3}
    publisher.holes = {2: 2}
    for key in range(5):
        publisher.publish(stored(key))
    watcher.until(lambda: watcher.blocks == set(range(5)))
    assert watcher.source.state == "synced"
    assert publisher.requests >= 3


def test_after_five_attempts_the_engine_is_degraded_and_forgotten(
    publisher: Publisher, watcher: Watcher
) -> None:
    before = publisher.requests
    publisher.mute = {1}
    publisher.holes = {1: 100}
    publisher.publish(stored(1))
    publisher.publish(removed(1))
    publisher.publish(stored(9))
    watcher.until(lambda: watcher.source.state == "degraded")
    watcher.until(lambda: watcher.blocks == {9})
    assert watcher.forgotten == 1
    assert publisher.requests - before == MAX_ATTEMPTS
    publisher.publish(stored(10))
    watcher.until(lambda: watcher.blocks == {9, 10})
    assert watcher.source.counters["kv_replays_failed"] == 1


def test_a_replay_that_never_answers_degrades(publisher: Publisher, watcher: Watcher) -> None:
    publisher.answers = False
    publisher.mute = {0}
    publisher.publish(stored(1))
    publisher.publish(stored(2))
    watcher.until(lambda: watcher.source.state == "degraded")
    watcher.until(lambda: watcher.blocks == {2})


def test_a_restarted_publisher_starts_from_nothing(publisher: Publisher, watcher: Watcher) -> None:
    publisher.publish(stored(1, 2))
    watcher.until(lambda: watcher.blocks == {1, 2})
    publisher.kill()
    watcher.until(lambda: watcher.blocks == set())
    assert watcher.source.state == "waiting"
    publisher.start()
    publisher.publish(stored(5))
    watcher.until(lambda: watcher.blocks == {5})
    watcher.until(lambda: watcher.source.state == "synced")


def test_a_restart_under_our_eyes_is_noticed_by_its_first_batch(
    publisher: Publisher, watcher: Watcher
) -> None:
    publisher.publish(stored(1))
    publisher.publish(stored(2))
    watcher.until(lambda: watcher.blocks == {1, 2})
    publisher.seq, publisher.buffer = 0, []
    publisher.publish(stored(8))
    watcher.until(lambda: watcher.blocks == {8})


def test_without_a_replay_socket_a_gap_costs_the_picture(tmp_path: Path, watch: Watch) -> None:
    with closing(Publisher(tmp_path, replay=False)) as publisher:
        watcher = followed(watch, publisher)
        publisher.mute = {1}
        publisher.publish(stored(1))
        publisher.publish(removed(1))
        publisher.publish(stored(2))
        watcher.until(lambda: watcher.blocks == {2})
        assert watcher.source.state == "degraded"


def test_garbage_is_refused_and_the_rest_goes_on(publisher: Publisher, watcher: Watcher) -> None:
    publisher.publish(stored(1))
    for frames in (
        [b""],
        [b"", b"\0" * 7, b""],
        [b"", b"\0" * 8, b"\xc1"],
        [b"", b"\xff" * 8, b""],
    ):
        publisher.pub.send_multipart(frames)
    publisher.publish(stored(2))
    watcher.until(lambda: watcher.blocks == {1, 2})
    assert watcher.source.counters["kv_refused"] == 4


@pytest.mark.parametrize("replay", [True, False])
@pytest.mark.parametrize("payload", [b"\xc1", b"{}", msgspec.msgpack.encode([1.5, None])])
def test_a_batch_that_cannot_be_read_is_no_gap(
    tmp_path: Path, watch: Watch, payload: bytes, replay: bool
) -> None:
    """A replay would bring the same batch each time, and then all would be forgotten."""
    with closing(Publisher(tmp_path, replay=replay)) as publisher:
        watcher = followed(watch, publisher)
        publisher.publish(stored(1))
        publisher.publish_raw(payload)
        publisher.publish(stored(2))
        watcher.until(lambda: watcher.blocks == {1, 2})
        assert (watcher.source.sequence.gaps, watcher.forgotten) == (0, 0)
        assert watcher.source.state == "partial"
        assert watcher.source.counters["kv_left_out"] == 1
        assert "refused" in watcher.source.last_left_out
        if replay:  # and so it is for who comes later
            other = watch(publisher)
            other.until(lambda: other.blocks == {1, 2} and other.settled())
            assert other.source.state == "partial"


def test_unreadable_messages_are_no_good_state(publisher: Publisher, watcher: Watcher) -> None:
    for _ in range(3):
        publisher.pub.send_multipart([b"kv-events", b"no sequence number is here"])
    watcher.until(lambda: watcher.source.counters["kv_refused"] == 3)
    assert watcher.source.state == "partial"
    assert "3 frames" in watcher.source.last_left_out


def test_a_replay_without_the_topic_is_read_too(publisher: Publisher, watch: Watch) -> None:
    """Older vLLM and SGLang send one frame less."""
    publisher.topic = None
    publisher.publish(stored(1))
    watcher = watch(publisher)
    watcher.until(lambda: watcher.blocks == {1} and watcher.settled())
    publisher.wait_for_subscriber()
    publisher.mute = {1}
    publisher.publish(stored(2))
    publisher.publish(stored(3))
    watcher.until(lambda: watcher.blocks == {1, 2, 3})
    assert (watcher.source.state, watcher.forgotten) == ("synced", 0)


def publish_under(publisher: Publisher, topic: bytes, seq: int, key: int) -> None:
    payload = msgspec.msgpack.encode([1.5, [stored(key)]])
    publisher.pub.send_multipart([topic, seq.to_bytes(8, "big"), payload])


def test_another_topic_that_begins_alike_is_anothers(publisher: Publisher, watch: Watch) -> None:
    """ZeroMQ subscribes by prefix."""
    watcher = followed(watch, publisher, topic="kv@pod-1")
    publisher.topic = b"kv@pod-1"
    publisher.publish(stored(1))
    for seq, topic in enumerate((b"kv@pod-10", b"kv@pod-1\0", b"kv@pod-11")):
        publish_under(publisher, topic, seq, 50 + seq)
    publisher.publish(stored(2))
    watcher.until(lambda: watcher.blocks == {1, 2})
    assert watcher.source.state == "synced"
    assert watcher.source.counters["kv_other_topics"] == 3
    assert watcher.source.sequence.gaps == 0


def test_several_topics_are_several_publishers(publisher: Publisher, watcher: Watcher) -> None:
    """Without a topic, all are heard: their numbers have nothing to do with each other."""
    for seq in range(3):
        for topic, key in ((b"kv@pod-1", 1), (b"kv@pod-2", 11)):
            publish_under(publisher, topic, seq, key + seq)
    watcher.until(lambda: watcher.source.counters["kv_other_topics"] == 3)
    assert watcher.blocks == {1, 2, 3}
    assert watcher.source.state == "partial"
    assert "several topics" in watcher.source.last_left_out
    assert (watcher.source.sequence.gaps, watcher.forgotten) == (0, 0)


@pytest.mark.parametrize("replay", [True, False])
def test_an_event_that_cannot_be_read_costs_itself_and_the_state_says_so(
    tmp_path: Path, watch: Watch, replay: bool
) -> None:
    with closing(Publisher(tmp_path, replay=replay)) as publisher:
        watcher = followed(watch, publisher)
        publisher.publish(stored(1))
        publisher.publish(stored(2), {**stored(9), "medium": "tape"})
        watcher.until(lambda: watcher.blocks == {1, 2})
        assert watcher.source.state == "synced", "no block of the pool is concerned"
        assert "tape" in watcher.source.last_left_out
        publisher.publish({**stored(9), "block_size": 0})
        publisher.publish({**stored(9), "block_hashes": None}, stored(3))
        watcher.until(lambda: watcher.blocks == {1, 2, 3})
        assert watcher.source.state == "partial"
        assert watcher.source.counters["kv_left_out"] == 3
        assert "block_hashes" in watcher.source.last_left_out
        assert (watcher.forgotten, watcher.source.sequence.gaps) == (0, 0)


def test_a_pool_under_a_name_that_is_not_known_leaves_no_good_state(
    publisher: Publisher, watcher: Watcher
) -> None:
    publisher.publish({**stored(1), "medium": "XPU"})
    watcher.until(lambda: watcher.source.state == "partial")
    assert "XPU" in watcher.source.last_left_out
    assert watcher.blocks == set()


def test_batches_that_wait_for_a_replay_mean_what_they_mean_behind_it(
    publisher: Publisher, watcher: Watcher
) -> None:
    """Which group counts, and how often a block is in the pool, is told by those before them."""
    window = {"group_idx": 0, "kv_cache_spec_kind": "sliding_window"}
    full = {"group_idx": 1, "kv_cache_spec_kind": "full_attention"}
    publisher.mute = {0}
    publisher.publish({**stored(1, 2), **full})
    publisher.publish({**stored(2), **full, "parent_block_hash": 1})
    publisher.publish({**removed(1), "group_idx": 0}, {**removed(2), "group_idx": 1})
    publisher.publish({**stored(3), **window})
    watcher.until(lambda: watcher.source.sequence.expected == 4 and watcher.settled())
    assert watcher.blocks == {1, 2}


@pytest.mark.engine
def test_vllms_own_publisher(tmp_path: Path) -> None:
    kv_events = pytest.importorskip("vllm.distributed.kv_events")
    endpoint, replay = f"ipc://{tmp_path}/pub", f"ipc://{tmp_path}/replay"
    publisher = kv_events.ZmqEventPublisher(0, endpoint, replay, buffer_steps=100)

    def publish(*keys: int) -> None:
        event = kv_events.BlockStored(
            block_hashes=list(keys), parent_block_hash=None, token_ids=[0] * 16, block_size=16,
            lora_id=None, medium="GPU", lora_name=None,
        )  # fmt: skip
        publisher.publish(kv_events.KVEventBatch(ts=time.time(), events=[event]))

    watcher = Watcher(endpoint, replay, QUICK_S)
    try:
        publish(1, 2)  # before anybody listens: only the replay can bring it
        watcher.until(lambda: watcher.blocks == {1, 2} and watcher.settled())
        publish((1 << 64) - 1)
        watcher.until(lambda: (1 << 64) - 1 in watcher.blocks)
        assert watcher.source.state == "synced"
    finally:
        watcher.close()
        publisher.shutdown()


class _Ticks:
    """A clock that goes on by a tenth of a second whenever somebody looks."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 0.1
        return self.now


def test_what_is_watched_takes_only_its_time(publisher: Publisher, watcher: Watcher) -> None:
    """A turn took up to 256 batches of each publisher, however long they took."""
    for key in range(30):
        publisher.publish(stored(key))
    time.sleep(0.2)
    clock = watcher.source._clock = _Ticks()
    taken = []
    while sum(taken) < 30:
        taken.append(sum(1 for _ in watcher.source.receive(256, clock.now + 1.0)))
        assert 1 <= taken[-1] <= 10
    assert sum(taken) == 30


class _Source:
    """Takes a second for what it has, each time."""

    deadline = None

    def __init__(self, name: str, clock: _Ticks, order: list[str]) -> None:
        self.engine, self._clock, self._order = name, clock, order

    def receive(self, limit: int, until: float) -> Iterator[list[Any]]:
        self._order.append(self.engine)
        self._clock.now += 1.0
        yield []

    def lost_step(self) -> None:
        raise AssertionError("nothing was lost")


def test_a_publisher_that_takes_long_keeps_no_other_from_its_turn() -> None:
    clock, order = _Ticks(), list[str]()
    sources: Any = [_Source(name, clock, order) for name in "abc"]
    ears = SimpleNamespace(receive=lambda limit, seconds: (), peer=lambda engine: None)
    graph = SimpleNamespace(slices=lambda engine, events: iter(()), lock=nullcontext())
    planner = SimpleNamespace(applied=lambda: None)
    made: tuple[Any, ...] = (graph, ears, sources, planner, None, clock)
    intake = Intake(*made)
    for turn in range(1, 7):
        before = clock.now
        intake.receive_and_apply()
        assert len(order) == turn, "one has used the time up"
        assert clock.now - before < 3.0
    assert order == list("abcabc")


class Asked:
    """A replay that is under way; what it brings is given by hand."""

    endpoint, active, attempts = "x", True, 1

    def ask(self, first: int) -> None: ...

    def restart_timeout(self) -> None: ...

    def close(self) -> None:
        self.active = False


class Unwalked(dict[int, Any]):
    """Entries that may be taken one by one only."""

    def items(self) -> NoReturn:
        raise AssertionError("one batch walks all those that wait")

    __iter__ = items


def replaying() -> KvOrder:
    order = KvOrder("e", Asked(), Counter(), lambda: 0.0)  # type: ignore[arg-type]
    order.life.known, order.life.joining = SourceState.FOLLOWING, False
    return order


def test_a_batch_is_put_in_order_without_a_walk_over_those_that_wait() -> None:
    order = replaying()
    order._waiting = Unwalked()
    batches: dict[int, Any] = {seq: [seq] for seq in range(8)}
    for seq in (5, 6, 7, 3):
        assert not list(order.take_live(seq, batches[seq]))
    wanted = filter(order.wants, range(8))
    applied = [batch for seq in wanted for batch in order.take_replayed(seq, batches[seq])]
    assert applied == [[seq] for seq in range(8)]
    assert (order.state, order.sequence.expected) == (SourceState.FOLLOWING, 8)


def test_batches_up_to_a_beginning_that_is_lost_wait_no_longer() -> None:
    order = replaying()
    order.life.joining = True
    for seq in (2, 7, 9):
        assert not list(order.take_live(seq, [seq]))  # type: ignore[list-item]
    order.skip_lost_beginning(7)
    applied = [batch for seq in (7, 8) for batch in order.take_replayed(seq, [seq])]  # type: ignore[list-item]
    assert applied == [[7], [8], [9]]
    assert order.state is SourceState.PARTIAL, "and the replay is over"
