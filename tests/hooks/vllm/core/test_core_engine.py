"""The compiled engine core does what the Python path does, and steps aside where it may not."""

from __future__ import annotations

import gc
import logging
import os
import random
import shutil
import subprocess
import sys
import sysconfig
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kvgraph.graph.types import as_keys
from kvgraph.graph.wire import frames as wire
from kvgraph.hooks.keys import key_in_pool, pack_hashes
from kvgraph.hooks.settings import CORE_VARIABLE
from kvgraph.hooks.vllm import core_choice
from kvgraph.hooks.vllm.core_index import CoreIndex
from kvgraph.hooks.vllm.free_queue.arranger import FreeQueueArranger
from kvgraph.hooks.vllm.free_queue.core_window import CoreVictims
from kvgraph.hooks.vllm.free_queue.window import Victims
from kvgraph.hooks.vllm.index import BlockIndex, FoundBlocks
from kvgraph.hooks.vllm.recall.support import RefusedRecall
from kvgraph_bench.hotpath import (
    BLOCK_SIZE,
    STEP,
    a_ranking,
    cached_pool,
    connected,
    new_pool,
    request_maker,
)
from kvgraph_bench.paper.paper_engine import Shape
from kvgraph_bench.steps.step_figures import BATCHED_TOKENS, REQUESTS, Clock
from kvgraph_bench.steps.step_loop import Load, StepLoop, StepSidecar
from paper import text
from pool_requests import leave_behind, ranking

ROOT = Path(__file__).parents[4]
pytest.importorskip("kvgraph._engine", reason="there is no compiled core in this installation")
pytestmark = pytest.mark.usefixtures("vllm_loaded")


def engine_of(
    core: str, load: Load, monkeypatch: pytest.MonkeyPatch, tiers_of: int | None = None
) -> Any:
    """An engine of the bench with a core, and the sidecar that advises it."""
    monkeypatch.setenv(CORE_VARIABLE, core)
    clock = Clock()
    loop = StepLoop(load, lambda pool: connected(pool, tiers_of, clock, BATCHED_TOKENS, REQUESTS))
    return SimpleNamespace(
        loop=loop, clock=clock, sidecar=StepSidecar(loop.connector.side, clock), pool=loop.pool
    )


def links(pool: Any) -> list[tuple[int, int, int]]:
    """Each block of the free queue, with those before and behind it."""
    queue, found = pool.free_block_queue, []
    block = queue.fake_free_list_head.next_free_block
    while block is not queue.fake_free_list_tail:
        before, behind = block.prev_free_block, block.next_free_block
        assert before.next_free_block is block
        assert behind.prev_free_block is block
        found.append((block.block_id, before.block_id, behind.block_id))
        block = behind
    assert len(found) == queue.num_free_blocks
    return found


def test_an_engine_has_the_core_unless_its_environment_asks_for_python(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert type(connected(new_pool(16)).side.index) is CoreIndex
    monkeypatch.setenv(CORE_VARIABLE, "python")
    assert type(connected(new_pool(16)).side.index) is BlockIndex


@pytest.mark.parametrize("number", range(3))
def test_random_traffic_leaves_the_same_events_index_and_queue(number: int) -> None:
    seed = random.randrange(1 << 30)
    assert core_choice.prove(rounds=300, seed=seed) is None, f"seed {seed}"


def decided_by(side: Any) -> tuple[Any, ...]:
    """What a side knows of its steps, and decides by."""
    window, demand = side.arranger._window, side._demand
    return (
        side._prefill.tokens_per_s, demand.prompts, demand.loaded, window.reach, window.prompts,
        window._largest_step, side._changes.stored, side.arranger.stale, side.arranger.recycled,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("running", "prefill", "tiers_of"),
    [(8, False, None), (48, False, None), (8, True, None), (8, False, 2500), (48, False, 900)],
)
def test_both_cores_tell_and_lay_the_same_step_by_step(
    running: int, prefill: bool, tiers_of: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frame by frame, and link by link, under advice from a real graph."""
    load = Load(running, 2500, prefill)
    arms = [engine_of(core, load, monkeypatch, tiers_of) for core in ("python", "")]
    told: list[list[bytes]] = [[], []]
    for arm, frames in zip(arms, told, strict=True):
        take = arm.loop.connector.side.client.outbox.take_all

        def kept(take: Any = take, frames: list[bytes] = frames) -> Any:
            events = take()
            plain = [each for each in events if not hasattr(each, "request_id")]
            frames.append(wire.encode_events(0, plain)[-1])
            return events

        arm.loop.connector.side.client.outbox.take_all = kept
        clock, sidecar = arm.clock, arm.sidecar

        def settled(clock: Any = clock, sidecar: Any = sidecar) -> None:
            clock.now += 1.0
            sidecar.hear()

        arm.loop.fill(settled)
    for _ in range(150):
        for arm in arms:
            arm.loop.prepare()
            arm.loop.step()
            arm.clock.now += load.step_s
            arm.sidecar.hear()
        assert links(arms[0].pool) == links(arms[1].pool)
        one, other = (decided_by(arm.loop.connector.side) for arm in arms)
        assert one == other
    python, compiled = told
    assert len(python) == len(compiled)
    assert python == compiled
    moved = [arm.loop.connector.side.arranger.moved for arm in arms]
    assert moved[0] == moved[1] > 0


@pytest.mark.parametrize("protected", [0, 4])
def test_a_step_in_which_nothing_happened_asks_nobody(
    protected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CORE_VARIABLE, "")
    pool, make = new_pool(200), request_maker()
    connector = connected(pool)
    request = make(list(range(150 * BLOCK_SIZE)))
    leave_behind(pool, request)
    pool.get_new_blocks(49)  # no blank one is left
    side, asked = connector.side, list[str]()
    keys = as_keys(pack_hashes(request.block_hashes))
    side.client.hold_ranking(a_ranking(keys[:3:-1].copy(), protected=keys[:protected].copy()))
    stated = keys[2 : 2 + protected].tolist()
    side.arranger.stated(stated, False)
    for _ in range(4):
        connector.build_connector_meta(STEP)
    assert side.arranger.moved > 16
    for part, name in (
        (side, "_arrange"), (side.arranger, "rests"), (side._changes, "take"),
        (side.client, "ranking"), (side._news, "after_step"),
    ):  # fmt: skip
        monkeypatch.setattr(part, name, lambda *_, name=name: asked.append(name))
    assert side._steps.step(8, 0, 0) == 0
    connector.build_connector_meta(STEP)
    assert not asked
    for is_over in (False, True):
        side.arranger.stated(stated, is_over)
        assert side._steps.step(8, 0, 0) == 0, "a caller's word that is known disturbs nobody"
    side.arranger.stated([1], False)
    assert side._steps.step(8, 0, 0) == 8, "a new one does"


@pytest.mark.parametrize("core", ["", "python"])
@pytest.mark.parametrize(("named", "protected"), [(0, 0), (4, 0), (4, 4), (40, 4)])
def test_a_step_under_a_ranking_that_names_no_more_asks_nobody(
    named: int, protected: int, core: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under LRU, which orders nothing, or where running requests read nearly all blocks."""
    monkeypatch.setenv(CORE_VARIABLE, core)
    pool, make, asked = new_pool(200), request_maker(), list[int]()
    connector = connected(pool)
    request = make(list(range(150 * BLOCK_SIZE)))
    leave_behind(pool, request)
    pool.get_new_blocks(49)  # no blank one is left
    side = connector.side
    keys = as_keys(pack_hashes(request.block_hashes))
    first = a_ranking(keys[:named].copy(), protected=keys[named : named + protected].copy())
    side.client.hold_ranking(first)
    for _ in range(3):
        connector.build_connector_meta(STEP)
    assert side.arranger.moved == named
    monkeypatch.setattr(side.arranger, "step", lambda *_: asked.append(1))
    connector.build_connector_meta(STEP)
    guards = protected > 0 and named < 16
    assert bool(asked) == guards, "only where a step may take others, which are protected"
    asked.clear()
    side.client.hold_ranking(a_ranking(keys[:8].copy()))
    connector.build_connector_meta(STEP)
    assert asked, "a new one is looked at"


@pytest.mark.parametrize("core", ["", "python"])
def test_no_step_rests_on_a_ranking_that_is_too_old(
    core: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CORE_VARIABLE, core)
    now, pool, asked = 100.0, new_pool(200), list[int]()
    connector = connected(pool, clock=lambda: now)
    request = request_maker()(list(range(150 * BLOCK_SIZE)))
    leave_behind(pool, request)
    pool.get_new_blocks(49)  # no blank one is left
    side, keys = connector.side, as_keys(pack_hashes(request.block_hashes))
    side.client.hold_ranking(ranking(keys.tolist(), ts=now))
    for _ in range(4):
        connector.build_connector_meta(STEP)
    monkeypatch.setattr(side.arranger, "step", lambda *_: asked.append(1))
    now += side.client.max_stale_s
    connector.build_connector_meta(STEP)
    assert not asked
    now += 0.1
    connector.build_connector_meta(STEP)
    assert asked


def test_with_tiers_a_decode_step_hands_nothing_on(
    paper: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recall, which this model is not calibrated for, only says so when a request ends."""
    monkeypatch.setenv(CORE_VARIABLE, "")
    engine = paper(Shape(warm=64))
    engine.ask(text(4, 1), output=40)
    for _ in range(4):
        engine.step()
    side, taken = engine.side, list[int]()
    assert isinstance(side.recall, RefusedRecall)
    take = side._changes.take
    monkeypatch.setattr(side._changes, "take", lambda: taken.append(1) or take())
    for _ in range(24):  # and a block enters the prefix cache
        engine.step()
    assert not taken


def test_an_error_of_ours_between_two_steps_is_raised_by_the_next(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool = new_pool(16)
    connector = connected(pool)
    side = connector.side
    connector.build_connector_meta(STEP)

    def fails() -> None:
        raise ValueError

    side.tap.freed = fails
    pool.free_blocks(pool.get_new_blocks(2))
    connector.build_connector_meta(STEP)
    assert connector.side is None
    assert "ValueError" in caplog.text


def test_keys_that_the_core_did_not_hear_of_can_be_forgotten() -> None:
    pool, keys, index = cached_pool(9, compiled=True)
    reference = BlockIndex(pool)
    reference.cached(keys.tolist(), range(1, 9))
    hashes = [pool.blocks[at].block_hash for at in range(1, 9)]
    gone = index.forget(hashes[:3], keys[:3].tolist())
    assert list(gone) == list(reference.forget(hashes[:3], keys[:3].tolist()))
    assert index.holders(keys).tolist() == reference.holders(keys).tolist()
    assert index.find(int(keys[0])) is None


def test_victims_that_somebody_else_laid_can_be_followed() -> None:
    pool, _, index = cached_pool(9, compiled=True)
    victims, reference = CoreVictims(index.core), Victims(9)
    blocks = pool.free_block_queue.get_all_free_blocks()[:4]
    for each in (victims, reference):
        each.add(FoundBlocks.told(blocks))
    assert len(victims) == len(reference) == 4
    assert victims.blocks == reference.blocks == blocks
    assert victims.last is reference.last is blocks[3]
    assert victims.forget([blocks[1].block_id]) == 1
    pool.get_new_blocks(1)
    victims.drop_taken()
    assert victims.blocks == blocks[2:]


def test_a_wrong_core_is_said_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(CORE_VARIABLE, "pyton")
    connected(new_pool(16))
    assert f"{CORE_VARIABLE}='pyton'; allowed: python; its default is taken" in caplog.text


def test_a_core_that_fails_its_proof_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    core_choice._reason_in_this_process.cache_clear()
    monkeypatch.setattr(core_choice, "prove", lambda: "it differs in the index")
    try:
        with caplog.at_level(logging.INFO):
            connector = connected(new_pool(16))
        assert type(connector.side.index) is BlockIndex
        assert [each for each in caplog.messages if "run in Python" in each] == [
            "kvgraph: the hooks run in Python: it differs in the index"
        ]
    finally:
        core_choice._reason_in_this_process.cache_clear()


def test_a_wrong_move_is_seen_by_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof compares what stands in the queue, and not what the core says."""
    scratch = core_choice._Scratch(random.Random(3))
    for _ in range(20):
        scratch.step()
    queue: Any = scratch._pool.free_block_queue
    first = queue.fake_free_list_head.next_free_block
    assert scratch.compare() is None
    core = scratch._core

    class Torn:
        def __getattr__(self, name: str) -> Any:
            return getattr(core, name)

        def lay(self, *given: Any) -> int:
            looked: int = core.lay(*given)
            queue.fake_free_list_head.next_free_block = first.next_free_block
            return looked

    scratch._core = Torn()  # type: ignore[assignment]
    assert scratch.compare() == "the free queue"


def test_a_block_without_the_slots_that_are_written_is_refused() -> None:
    """As in a vLLM whose queue is no longer Python's."""

    class Block:
        block_id = 0

    pool = SimpleNamespace(
        blocks=[Block()], free_block_queue=SimpleNamespace(fake_free_list_head=Block()),
        cache_full_blocks=new_pool(2).cache_full_blocks,
    )  # fmt: skip
    group = SimpleNamespace(index=0, block_size=BLOCK_SIZE)
    with pytest.raises(TypeError, match="no slot"):
        CoreIndex(pool, group)  # type: ignore[arg-type]


def test_an_engine_that_is_gone_leaves_nothing_behind() -> None:
    """The core holds the pool, and the pool the core's shadows of its methods."""
    pool = new_pool(64)
    connector = connected(pool)
    request = request_maker()(list(range(4 * BLOCK_SIZE)))
    blocks = leave_behind(pool, request)
    connector.build_connector_meta(STEP)
    gone = weakref.ref(pool)
    connector.shutdown()
    del pool, connector, blocks, request
    gc.collect()
    assert gone() is None


def test_resets_that_are_followed_for_good_pile_nothing_up() -> None:
    pool = new_pool(16)
    side = connected(pool).side
    side.tap.detach(but_resets=True)
    for _ in range(3):
        assert pool.reset_prefix_cache()
    assert side.tap.next() is None


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("stale", [True, False])
def test_a_hit_has_more_victims_laid_unless_the_advice_went_stale(
    stale: bool, compiled: bool
) -> None:
    """The same step takes blocks right after the hit, and there may be no step in between."""
    pool, keys, index = cached_pool(1001, compiled=compiled)
    arranger = FreeQueueArranger(pool, index, blocks_per_step=64)
    arranger.expect(16, 0)
    arranger.step(a_ranking(np.random.default_rng(2).permutation(keys)))
    hit = pool.free_block_queue.get_all_free_blocks()[: arranger.moved - 8]
    if stale:
        arranger.guard_head()
    pool.touch(hit)
    moved = arranger.moved
    arranger.touched(hit)
    assert (arranger.moved == moved) is stale


def test_a_ranking_is_taken_in_while_the_engine_steps() -> None:
    """Without the GIL, on another thread; every number that is found is a block's of the pool."""
    pool, make = new_pool(2000), request_maker()
    connector = connected(pool)
    index = connector.side.index
    done, wrong = threading.Event(), list[int]()

    def ask() -> None:
        rng = np.random.default_rng(1)
        while not done.is_set():
            cached = [block.block_hash for block in pool.blocks[:500] if block.block_hash]
            keys = np.array(
                [*map(key_in_pool, cached), *rng.integers(9, 99, 9).tolist()], dtype=np.uint64
            )
            found = index.holders(rng.permutation(keys))
            wrong.extend(at for at in found.tolist() if not 0 <= at < 2000)

    thread = threading.Thread(target=ask)
    thread.start()
    for number in range(300):
        leave_behind(pool, make([number, *range(8 * BLOCK_SIZE - 1)]))
        connector.side.client.hold_ranking(ranking([1, 2, number + 1], epoch=number + 1))
        connector.build_connector_meta(STEP)
        if number % 10 == 9:
            connector.side.client.outbox.take_all()
    done.set()
    thread.join(30)
    assert not wrong
    assert connector.side is not None
    assert 0 < len(index) <= 1999


def test_without_a_compiler_the_installation_succeeds_without_a_core(tmp_path: Path) -> None:
    program = "import setuptools; setuptools.setup()"  # which reads pyproject.toml
    setup = [sys.executable, "-W", "ignore", "-c", program, "-q", "build_ext", "-b", str(tmp_path)]
    environment = {**os.environ, "CC": "false", "CXX": "false", "LDSHARED": "false"}
    done = subprocess.run(
        [*setup, "-t", str(tmp_path / "objects")], cwd=ROOT, env=environment, capture_output=True,
        text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.rglob("_engine*.so"))


@pytest.mark.large
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_sanitizers_find_nothing(sanitizer: str, tmp_path: Path) -> None:
    """The core built anew with a sanitizer, under random traffic of two threads."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++")
    library = subprocess.run(
        [compiler, f"-print-file-name=lib{sanitizer[0]}san.so"], capture_output=True, text=True
    ).stdout.strip()
    if not Path(library).is_absolute():
        pytest.skip(f"g++ has no lib{sanitizer[0]}san")
    built = tmp_path / f"_engine{sysconfig.get_config_var('EXT_SUFFIX')}"
    subprocess.run(
        [
            compiler, "-std=c++17", "-O1", "-g", f"-fsanitize={sanitizer}", "-fPIC", "-shared",
            f"-I{sysconfig.get_paths()['include']}", str(ROOT / "core/engine/engine.cpp"),
            "-o", str(built),
        ],
        check=True,
    )  # fmt: skip
    program = Path(__file__).with_name("sanitized.py")
    environment = {
        **os.environ, "LD_PRELOAD": library, "CORE_FILE": str(built),
        "ASAN_OPTIONS": "detect_leaks=0",
        "TSAN_OPTIONS": "report_signal_unsafe=0 exitcode=66", "PYTHONMALLOC": "malloc",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(program)], env=environment, capture_output=True, text=True, timeout=390
    )
    assert "Sanitizer" not in done.stderr, done.stderr[-4000:]
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.strip() == "agrees"
