"""The connector: what it tells, and that nothing of ours reaches vLLM when it fails or leaves."""

from __future__ import annotations

import gc
import itertools
import struct
import time
import weakref
from collections.abc import Callable
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kvgraph.graph.wire.events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    RequestFinished,
    RequestStarted,
    Segment,
)
from kvgraph.hooks.keys import key_of, pack_hashes, unpack
from kvgraph.hooks.vllm.connector import KvGraphConnector
from kvgraph.hooks.vllm.groups import ObservedGroup
from kvgraph.hooks.vllm.patches import bind_scheduler
from kvgraph_bench.hotpath import BLOCK_SIZE, STEP, connected, new_pool, request_maker
from kvgraph_bench.paper.paper_engine import PaperEngine, Shape
from msgspec import structs
from paper import fail, hashes_of, in_pool, park, text
from pool_requests import finish, ranking, start
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash, resolve_block_hashes

pytestmark = pytest.mark.usefixtures("vllm_loaded")
PROMPT = 10 * BLOCK_SIZE


@pytest.fixture
def pool() -> Any:
    return new_pool(64)


@pytest.fixture
def connector(pool: Any) -> Any:
    return connected(pool)


@pytest.fixture
def make() -> Any:
    make, numbers = request_maker(), itertools.count()
    return lambda: make([next(numbers), *range(PROMPT - 1)])


def told(connector: Any) -> list[Any]:
    events: list[Any] = connector.side.client.outbox.take_all()
    return events


def step(connector: Any) -> None:
    connector.build_connector_meta(STEP)


def serve(connector: Any, pool: Any, request: Any) -> list[Any]:
    """It starts, is computed in a step, and ends; what is told of it."""
    blocks = start(connector, pool, request)
    step(connector)
    finish(connector, pool, request, blocks)
    return told(connector)


def test_a_request_from_start_to_end(connector: Any, pool: Any, make: Any) -> None:
    request = make()
    request.session_id = "chat-1"
    request.kv_transfer_params = {
        "kvgraph": {
            "segments": [{"layer": "rules", "start": 0, "end": 64}], "session": "not this one",
            "tenant": "acme", "waiting_for_tool": True, "expected_return_s": 3.0,
        }
    }  # fmt: skip
    started, stored, finished = serve(connector, pool, request)
    packed = pack_hashes(request.block_hashes)
    assert 0 <= started.waited_s < 60
    assert structs.replace(started, waited_s=0.0) == RequestStarted(
        request.request_id, packed, PROMPT, 0, BLOCK_SIZE, "chat-1", "acme", (Segment(2, 0, 64),)
    )
    assert stored == BlocksStored(packed, None, BLOCK_SIZE)  # chat-1 is acme's, not anybody's
    assert 0 < finished.ran_s < 60
    assert structs.replace(finished, ran_s=0.0) == RequestFinished(
        request.request_id, packed, PROMPT, PROMPT, "finished_stopped", "chat-1", "acme",
        True, 3.0, False,
    )  # fmt: skip
    assert len(connector.side.index) == 10


def test_what_two_tenants_say_of_one_prompt_stays_apart(
    connector: Any, pool: Any, make: Any
) -> None:
    request = make()
    request.session_id, request.cache_salt = "chat-1", "one"
    started, stored, finished = serve(connector, pool, request)
    assert started.session == finished.session == "chat-1"
    assert started.tenant == finished.tenant
    assert started.tenant.startswith("salt-")
    assert stored.session is None, "a name alone would be another tenant's session"


def test_by_default_a_caller_speaks_of_its_session_only(
    pool: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AITHER_KVCACHE_HINTS")
    connector, request = connected(pool), make()
    request.kv_transfer_params = {
        "kvgraph": {
            "segments": [{"layer": "generation", "start": 0, "end": 64}],
            "session": "mine", "tenant": "acme", "session_ended": True,
        }
    }  # fmt: skip
    started, _, finished = serve(connector, pool, request)
    assert (started.session, started.tenant, started.segments) == ("mine", None, ())
    assert finished.session_ended


def test_hits_and_preemptions(connector: Any, pool: Any, make: Any) -> None:
    first = make()
    finish(connector, pool, first, start(connector, pool, first))
    told(connector)
    again = make()
    again.block_hashes = first.block_hashes
    again._all_token_ids = first._all_token_ids
    start(connector, pool, again, hits=9)
    connector.get_num_new_matched_tokens(again, 0)
    connector.update_state_after_alloc(again, None, 0)  # preempted and scheduled again
    started = [e for e in told(connector) if isinstance(e, RequestStarted)]
    assert [e.cached_tokens for e in started] == [9 * BLOCK_SIZE]


def test_a_request_that_never_ran_says_nothing(connector: Any, make: Any) -> None:
    request = make()
    connector.on_new_request(request)
    assert connector.side.observer.pressure().waiting == 1
    assert connector.request_finished_all_groups(request, ([],)) == (False, None)
    assert connector.side.observer.pressure().waiting == 0
    assert told(connector) == []


def test_removals_of_a_step_are_one_event(connector: Any, pool: Any, make: Any) -> None:
    request = make()
    finish(connector, pool, request, start(connector, pool, request))
    pool.get_new_blocks(53)  # all that is blank
    step(connector)
    told(connector)
    pool.get_new_blocks(7)
    step(connector)
    (removed,) = told(connector)
    tail_first = unpack(pack_hashes(request.block_hashes))[::-1]
    assert isinstance(removed, BlocksRemoved)
    assert unpack(removed.hashes) == tail_first[:7]
    assert len(connector.side.index) == 3


def test_a_key_that_came_back_before_it_was_told_was_gone(
    connector: Any, pool: Any, make: Any
) -> None:
    """The steps are told together; duplicates of another prompt are evicted beside it."""
    one, two, three = make(), make(), make()
    two.block_hashes, two._all_token_ids = one.block_hashes, one._all_token_ids
    held = [start(connector, pool, each) for each in (one, two, three)]
    for request, blocks in zip((one, two, three), held, strict=True):
        finish(connector, pool, request, blocks)
    step(connector)
    told(connector)
    pool.evict_blocks({block.block_id for blocks in held[1:] for block in blocks})
    step(connector)
    again = make()
    again.block_hashes, again._all_token_ids = three.block_hashes, three._all_token_ids
    start(connector, pool, again)
    step(connector)
    kinds = [type(event) for event in told(connector)]
    assert kinds.index(BlocksRemoved) < kinds.index(BlocksStored)


def test_a_reset_clears_everything(connector: Any, pool: Any, make: Any) -> None:
    request = make()
    finish(connector, pool, request, start(connector, pool, request))
    pool.reset_prefix_cache()
    step(connector)
    assert isinstance(told(connector)[-1], BlocksCleared)
    assert len(connector.side.index) == 0
    assert connector.side.resident() == b""


def test_resident_is_what_the_pool_caches(connector: Any, pool: Any, make: Any) -> None:
    request = make()
    start(connector, pool, request)
    resident = connector.side.resident()
    assert set(unpack(resident)) == set(unpack(pack_hashes(request.block_hashes)))
    assert len(resident) == 10 * 8


def test_the_users_own_kv_events_pass_unchanged(make: Any) -> None:
    def events_of(pool: Any, connector: Any) -> list[Any]:
        request = make()
        request.block_hashes = [bytes([i]) * 32 for i in range(10)]
        blocks = pool.get_new_blocks(10)
        pool.cache_full_blocks(request, blocks, 0, 10, BLOCK_SIZE, 0)
        pool.free_blocks(reversed(blocks))
        pool.get_new_blocks(60)
        return list(pool.take_events())

    ours, stock = new_pool(64), new_pool(64)
    for pool in (ours, stock):
        pool.enable_kv_cache_events = True
    connector = connected(ours)
    seen, expected = events_of(ours, connector), events_of(stock, None)
    assert [type(e) for e in seen] == [type(e) for e in expected]
    assert [e.block_hashes for e in seen] == [e.block_hashes for e in expected]
    step(connector)
    assert len(told(connector)) == 2


def test_a_step_applies_the_clients_ranking(connector: Any, pool: Any, make: Any) -> None:
    request = make()
    finish(connector, pool, request, start(connector, pool, request))
    step(connector)
    pool.get_new_blocks(53)  # all that is blank
    chain = unpack(pack_hashes(request.block_hashes))
    connector.side.client.hold_ranking(ranking(chain, epoch=3))
    connector.build_connector_meta(STEP)
    head = next(pool.free_block_queue.iter_blocks_after(None))
    assert key_of(head.block_hash[:-4]) == chain[0]
    applied = connector.side.heartbeat(5)[1]
    assert (applied.epoch, applied.dropped) == (3, 5)


@pytest.mark.parametrize(
    ("call", "default"),
    [
        (lambda c: c.on_new_request(None), None),
        (lambda c: c.get_num_new_matched_tokens(None, 5), (0, False)),
        (lambda c: c.update_state_after_alloc(None, None, 0), None),
        (lambda c: c.request_finished_all_groups(None, ()), (False, None)),
        (lambda c: c.request_finished(None, []), (False, None)),
    ],
)
def test_an_error_of_ours_disables_us_and_no_more(
    connector: Any, pool: Any, call: Any, default: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert call(connector) == default
    assert call(connector) == default
    assert len(caplog.records) == 1
    assert "disabled" in caplog.records[0].getMessage()
    assert connector.side is None
    assert "cache_full_blocks" not in vars(pool)
    assert connector.build_connector_meta(STEP) is not None


def test_a_change_that_we_cannot_read_disables_us_and_frees_the_pool(
    connector: Any, pool: Any
) -> None:
    side = connector.side
    side.tap.take = lambda: [[None]]
    side.tap.next = list  # what a compiled core noted, where there is one
    if side._steps is not None:
        side._steps.step = lambda *_: side._changes.take()
    step(connector)
    assert connector.side is None
    assert not {"cache_full_blocks", "reset_prefix_cache"} & set(vars(pool))


def test_larger_blocks_are_keyed_as_vllm_keys_them(make: Any) -> None:
    request = make()
    group = ObservedGroup(0, 2 * BLOCK_SIZE, BLOCK_SIZE)
    expected = list(resolve_block_hashes(request.block_hashes, BLOCK_SIZE, 2 * BLOCK_SIZE))
    assert list(group.hashes(request, PROMPT)) == expected
    assert list(group.hashes(request, 5 * BLOCK_SIZE)) == expected[:2]


def test_packing_agrees_with_vllms_own_64_bits() -> None:
    rng = np.random.default_rng(1)
    for n in (0, 1, 47, 48, 200):
        hashes = [rng.bytes(32) for _ in range(n)]
        external = [maybe_convert_block_hash(h) for h in hashes]
        assert unpack(pack_hashes(hashes)) == external
        assert struct.pack(f"<{n}Q", *external) == pack_hashes(hashes)


def test_a_worker_does_nothing(pool: Any) -> None:
    transfer = KVTransferConfig(
        kv_connector="KvGraphConnector", kv_role="kv_producer",
        kv_connector_extra_config={"kvgraph_endpoint": "ipc:///nowhere"},
    )  # fmt: skip
    config = SimpleNamespace(kv_transfer_config=transfer)
    worker = KvGraphConnector(config, KVConnectorRole.WORKER, None)
    worker.bind_gpu_block_pool(pool)
    assert worker.side is None
    assert worker.requires_kv_delivery is False
    assert worker.get_finished(set()) == (None, None)
    worker.start_load_kv(None)
    worker.wait_for_layer_load("0")
    worker.save_kv_layer("0", None, None)
    worker.wait_for_save()
    worker.shutdown()


Paper = Callable[..., Any]

PERSISTENT = [
    "bridge.ledger.clear",
    "bridge.ledger.announce_dropped",
    "bridge.ledger.directory.drop_all",
    "holding.end",
    "tap.detach",
    "client.close",
]


def break_for_good(side: Any, where: str) -> None:
    path, _, name = where.rpartition(".")
    setattr(attrgetter(path)(side), name, fail)


def closed(side: Any) -> list[float]:
    """What the client's ``close`` is called with from now on."""
    waits: list[float] = []
    close = side.client.close
    side.client.close = lambda wait_s: (waits.append(wait_s), close(wait_s))[1]
    return waits


@pytest.mark.parametrize("where", PERSISTENT)
def test_what_fails_again_while_we_leave_does_not_cross(
    paper: Paper, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A reset is caught up with by a thing that is broken, and leaving needs the same thing."""
    engine = paper(Shape(blocks=33, warm=64))
    park(engine, text(4, 1))
    side, waits = engine.side, closed(engine.side)
    bind_scheduler(engine.scheduler)
    break_for_good(side, where)
    side.arranger.step = fail
    engine.reset()
    engine.serve(text(4, 2))
    assert engine.side is None, "ours is out of the way"
    assert waits == [0.0] or where == "client.close"
    assert any("RuntimeError while it left" in each.getMessage() for each in caplog.records)
    assert "injected" not in caplog.text
    assert engine.serve(text(4, 1)) is not None
    assert engine.is_whole()


@pytest.mark.parametrize("where", PERSISTENT)
def test_an_engine_that_shuts_down_ends_its_workers_whatever_fails(
    paper: Paper, where: str
) -> None:
    engine = paper(Shape(blocks=33, warm=64))
    park(engine, text(4, 1))
    connector, ended = engine.connector, list[bool]()
    connector.worker = SimpleNamespace(close=lambda: ended.append(True))
    bind_scheduler(engine.scheduler)
    break_for_good(engine.side, where)
    connector.shutdown()
    assert ended == [True]
    assert connector.side is None


@pytest.mark.parametrize("warm", [None, 64])
def test_an_engine_that_was_shut_down_leaves_no_pool_behind(
    paper_config: Any, warm: int | None
) -> None:
    """In a notebook several engines live in one process, one after the other."""
    engine = PaperEngine(paper_config, Shape(blocks=65, warm=warm))
    engine.serve(text(7, 1), 4)
    pool = weakref.ref(engine.pool)
    engine.close()
    del engine
    for _ in range(20):  # the client's thread may be about to end
        gc.collect()
        if pool() is None:
            break
        time.sleep(0.01)
    assert pool() is None


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("warm", [None, 64])
def test_advice_that_came_while_the_engine_idled_decides_the_next_allocation(
    paper: Callable[..., Any], asynchronous: bool, warm: int | None
) -> None:
    engine = paper(Shape(blocks=33, asynchronous=asynchronous, warm=warm))
    kept, given = text(15, 1), text(15, 2)
    engine.serve(kept)
    engine.serve(given)
    keys = [key_of(each) for each in hashes_of(engine, given)]
    engine.side.client.hold_ranking(ranking(keys[::-1]))
    engine.serve(text(13, 3))
    assert in_pool(engine, kept) == 15, "the oldest would have gone, by the queue's own order"
    assert in_pool(engine, given) < 15
    assert engine.is_whole()
