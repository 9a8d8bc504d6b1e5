"""What an engine gives the shared store and takes from it, by its scheduler's decisions."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvgraph.graph.types import Tier
from kvgraph.graph.wire.events import BlocksSpilled, CopiesDropped
from kvgraph.hooks.settings import StoreSettings
from kvgraph.hooks.store.sealed import store_key
from kvgraph.hooks.store.stores import DirectoryStore
from kvgraph.hooks.tiers.jobs import Load, TierAnswer, WorkerStart
from kvgraph.hooks.vllm.tiers.sharing import PATIENCE_S, StoreLookup
from pool_engine import Engine, parked, picture, prompt
from waiting import until

pytestmark = pytest.mark.usefixtures("vllm_loaded")
ROOM = 1 << 30
NAME = "model"


class Fleet:
    """Engines on paper that share one directory; their workers put names of contents there."""

    def __init__(self, path: Path, **options: Any) -> None:
        self._settings = StoreSettings(str(path / "s"), ROOM, **options)
        self._files = DirectoryStore(self._settings.place, ROOM)
        self._contents: dict[bytes, Any] = {}

    def engine(self, warm: int = 32, **options: Any) -> Engine:
        engine = Engine(started=False, store=self._settings, **options)
        engine.worker.store = self._contents
        engine.hear(TierAnswer(starts=(WorkerStart(warm, store_name=NAME),)))
        return engine

    def settle(self, engine: Engine) -> None:
        """Whatever was shared is there as files too: lookups ask for these."""
        engine.settle()
        for block_hash in self._contents:
            self._files.put(store_key(NAME, block_hash), [b"x"])

    def take_away(self) -> None:
        """All that the store has is gone."""
        for block_hash in self._contents:
            self._files.remove(store_key(NAME, block_hash))
        self._contents.clear()

    def serve(self, engine: Engine, tokens: Sequence[int], request: Any = None) -> Any:
        heard(engine)
        turn = engine.ask(tokens)
        for name, value in (request or {}).items():
            setattr(turn.request, name, value)
        for _ in range(20):
            engine.step()
            if turn.state == "running":
                break
            heard(engine)
            engine.worker.finish_all()
        assert turn.state == "running"
        engine.end(turn)
        self.settle(engine)
        return turn


def heard(engine: Engine) -> None:
    """Wait for the store's word, which comes from a thread and by no engine's clock."""
    lookup = engine.side.store.lookup
    until(lambda: lookup is None or lookup.answered)


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path)


@pytest.fixture
def one(fleet: Fleet) -> Engine:
    """An engine that has shared a prompt."""
    engine = fleet.engine()
    assert fleet.serve(engine, prompt(4, 1)).computed == 4
    return engine


@pytest.fixture
def two(fleet: Fleet, one: Engine) -> Engine:
    """Another engine, that may load it."""
    return fleet.engine()


def test_what_one_engine_computed_another_loads(fleet: Fleet, two: Engine) -> None:
    turn = fleet.serve(two, prompt(4, 1))
    assert (turn.loaded, turn.computed) == (4, 0)
    assert two.counts.store_loaded == 4
    assert two.counts.shared == 4, "what was damaged there would be given again"
    two.check_whole()


def test_a_shared_prefix_goes_there_once(fleet: Fleet, one: Engine) -> None:
    fleet.serve(one, [*prompt(4, 1, extra=0), *prompt(2, 2)])
    assert one.counts.shared == 6


@pytest.mark.parametrize("warm", [0, 1, 3])
@pytest.mark.parametrize("at_turn_end", [True, False])
def test_an_engine_that_was_given_next_to_no_memory_falls_idle(
    tmp_path: Path, warm: int, at_turn_end: bool
) -> None:
    """What a process may lock can be less than what was asked for."""
    fleet = Fleet(tmp_path, at_turn_end=at_turn_end)
    engine = fleet.engine(warm=warm)
    fleet.serve(engine, prompt(4, 1))  # raises if the engine never falls idle
    engine.push_out()
    assert not engine.busy
    if at_turn_end:
        assert bool(engine.counts.shared) == bool(warm)
    engine.check_whole()


def test_at_eviction_what_is_copied_ahead_is_given(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, at_turn_end=False)
    one, two = fleet.engine(blocks=65), fleet.engine()
    fleet.serve(one, prompt(4, 1))
    one.push_out()
    fleet.settle(one)
    assert one.counts.shared >= 4
    assert fleet.serve(two, prompt(4, 1)).loaded == 4


def test_a_picture_that_its_content_names_is_shared(fleet: Fleet, two: Engine) -> None:
    fleet.serve(two, prompt(4, 2), {"mm_features": [picture("0f" * 32)]})
    assert two.counts.shared == 4


@pytest.mark.parametrize(
    "request_says",
    [
        {"cache_salt": "s"},
        {"lora_request": SimpleNamespace(lora_name="a")},
        {"mm_features": [picture("a name of its client's")]},
        {"kv_transfer_params": {"kvgraph": {"share": False}}},
        {"kv_transfer_params": {"kvgraph": {"share": "no"}}},
        {"kv_transfer_params": {"kvgraph": '{"share": false}'}},  # where no text is read
    ],
)
def test_what_a_request_forbids_stays_here(fleet: Fleet, request_says: dict[str, Any]) -> None:
    engine = fleet.engine()
    fleet.serve(engine, prompt(4, 1), request_says)
    engine.push_out()
    fleet.settle(engine)
    assert not set(engine.hashes_of(prompt(4, 1))) & set(engine.worker.store)


def test_salted_blocks_go_where_the_operator_allows_it(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, salted=True)
    engine = fleet.engine()
    fleet.serve(engine, prompt(4, 1), {"cache_salt": "s"})
    assert engine.counts.shared == 4


def test_what_is_not_there_after_all_is_computed_and_asked_once(fleet: Fleet, two: Engine) -> None:
    two.worker.store = {}
    turn = fleet.serve(two, prompt(4, 1))
    assert (turn.loaded, turn.computed) == (0, 4)
    assert two.counts.store_failed == 4
    assert two.counts.stalls == 1
    two.check_whole()


def test_memory_makes_room_for_what_comes(fleet: Fleet) -> None:
    fleet.serve(fleet.engine(), prompt(8, 1))
    two = fleet.engine(blocks=33)
    for seed in range(2, 8):
        parked(two, seed=seed)
    assert two.directory.room < 8
    assert fleet.serve(two, prompt(8, 1)).loaded == 8


def test_after_a_reset_the_store_is_left_alone(fleet: Fleet, two: Engine) -> None:
    assert two.reset()
    two.step()
    turn = fleet.serve(two, prompt(4, 1))
    assert turn.computed == 4, "its weights may be others"
    two.push_out()
    fleet.settle(two)
    assert two.counts.shared == 0


def test_one_that_ends_while_the_store_is_asked_leaves_nothing(fleet: Fleet, two: Engine) -> None:
    turn = two.ask(prompt(4, 1))
    two.step()
    two.end(turn)
    heard(two)
    fleet.settle(two)
    assert not two.directory.in_store
    assert not [job for job in two.worker.open if isinstance(job, Load)]
    two.check_whole()


def test_a_silent_store_keeps_nobody_waiting(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    leave = threading.Event()
    monkeypatch.setattr(DirectoryStore, "holds", lambda self, keys: leave.wait(30.0) and [])
    engine = fleet.engine(blocks=33)
    turns = [engine.ask(prompt(4, seed)) for seed in (1, 2)]
    for _ in range(10):  # of .05 s by the engine's own clock
        engine.step()
    assert [turn.state for turn in turns] == ["running", "running"]
    later = engine.ask(prompt(4, 3))
    engine.step()
    leave.set()
    assert later.state == "running", "while it hangs nobody is asked to wait"


def test_requests_that_come_one_after_the_other_do_not_all_wait_for_a_store_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave = threading.Event()
    monkeypatch.setattr(DirectoryStore, "holds", lambda self, keys: leave.wait(30.0) and [])
    now = 0.0
    lookup = StoreLookup(DirectoryStore(str(tmp_path / "s"), ROOM), lambda: now)
    lookup.names = [NAME]
    waited = []
    for number in range(40):
        lookup.ask(f"r{number}", [bytes([number]) * 32])
        waited.append(lookup.waits(f"r{number}"))
        now += PATIENCE_S / 10
    leave.set()
    assert waited == [number <= 10 for number in range(40)]


def test_who_hashes_blocks_otherwise_than_another_on_the_store_says_so_once(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm.v1.core import kv_cache_utils

    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", getattr(kv_cache_utils, "NONE_HASH", b""))
    for seed, lines in (("1", 0), ("1", 0), ("2", 1), ("2", 1)):
        monkeypatch.setenv("PYTHONHASHSEED", seed)  # read as the engine's core starts
        fleet.serve(fleet.engine(), prompt(4, 1))
        said = [each for each in caplog.messages if "on this shared store" in each]
        assert len(said) == lines
    assert "another engine of 'model' on this shared store has 'blocks of " in said[0]
    assert "sha256 " in said[0]


def told(engine: Engine, kind: type) -> list[bytes]:
    """Hashes of an engine's events about the store."""
    events = [each for each in engine.events if isinstance(each, kind)]
    return [each.hashes for each in events if each.tier == Tier.POOL]


def test_the_sidecar_hears_what_is_in_the_store_and_what_is_lost_there(
    fleet: Fleet, one: Engine, two: Engine
) -> None:
    given = b"".join(told(one, BlocksSpilled))
    assert len(given) == 8 * len(one.side.store.sharer.known()) > 0
    assert given in b"".join(each.hashes for each in one.side.copies())
    fleet.serve(two, prompt(4, 1))
    found = told(two, BlocksSpilled)[0]
    assert found
    assert given.startswith(found), "it was looked up, and is there"
    assert one.bridge.ledger.report().reads_store
    fleet.take_away()
    three = fleet.engine()
    fleet.serve(three, prompt(4, 1))
    assert b"".join(told(three, CopiesDropped)) == given[:8], "the first that is not there"
    one.drop_copies()
    assert not one.bridge.ledger.report().reads_store
