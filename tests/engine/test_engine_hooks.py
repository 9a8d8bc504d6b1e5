"""Real vLLM engines with and without our hooks: the same tokens, whatever happens to the sidecar.
Each engine is a process of its own, because the switch is read once and engines differ in it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvgraph.graph.wire.advice import EvictionRanking
from kvgraph.graph.wire.events import (
    AdviceApplied,
    BlocksRemoved,
    BlocksStored,
    EngineHello,
    RequestFinished,
    RequestStarted,
)

pytestmark = pytest.mark.engine
SCRIPT = "engine_run.py"


@pytest.fixture(scope="module")
def stock(tiny_model: Path, new_engine: Any) -> Any:
    """The engine without us: the truth that every other run is compared with."""
    return new_engine(SCRIPT, {"model": str(tiny_model)}).run()


def test_off_loads_nothing_of_ours(stock: Any) -> None:
    assert stock.result["connector"] == "NoneType"
    # vLLM imports the plugin to ask it; it imports no more than its own settings.
    assert [m for m in stock.result["modules"] if not m.startswith("kvgraph.hooks")] == []
    assert "kvgraph.hooks.link.client" not in stock.result["modules"]
    assert stock.lines("kvgraph: ") == []


def test_advice_keeps_what_returns_and_changes_no_token(
    stock: Any, new_engine: Any, tiny_model: Path, router: Any
) -> None:
    engine = new_engine(
        SCRIPT, {"model": str(tiny_model), "pause_s": 0.12},
        AITHER_KVCACHE_GRAPH="1", AITHER_KVCACHE_SIDECAR=router.endpoint,
    )  # fmt: skip
    try:
        _advise_until_over(router, engine)
    finally:
        run = engine.run()
    assert run.result["texts"] == stock.result["texts"]
    assert run.result["cached"] >= 1.5 * stock.result["cached"]
    assert run.result["queue_is_whole"]
    assert run.result["applied"]["moved"] > 0
    assert run.result["applied"]["protected_evicted"] == 0
    assert run.result["garbage"] > 0
    assert len(run.lines("not advice")) == 1
    assert run.result["defer_block_free"] is False
    assert run.result["requires_kv_delivery"] is False
    _check_story(router)


def _advise_until_over(router: Any, engine: Any) -> None:
    """Rank what one-off sessions left behind, between frames of nonsense."""
    epoch, deadline = 0, time.monotonic() + 150
    while engine.running and time.monotonic() < deadline:
        router.read(0.05)
        once, hot = _keys_by_session(router)
        if not len(once):
            continue
        epoch += 1
        heard = router.batches[-1][0] + 1
        named = {"order": once, "protected": hot, "heard": heard}
        router.advise(replace(EvictionRanking.empty(0.0), epoch=epoch, **named), epoch)
        router.send_frames([b"KVG\x01", b"short", b"\xff" * 50])
    router.read(0.1)


def _keys_by_session(router: Any) -> tuple[Any, Any]:
    finished = [e for e in router.events if isinstance(e, RequestFinished)]
    once = b"".join(e.hashes for e in finished if e.session_ended)
    hot = b"".join(e.hashes for e in finished if not e.session_ended)
    kept = np.unique(np.frombuffer(hot, dtype="<u8"))
    return np.setdiff1d(np.frombuffer(once, dtype="<u8"), kept), kept


def _check_story(router: Any) -> None:
    """What the engine told adds up: every request, and residency that is what was stored."""
    events = router.events
    assert isinstance(events[0], EngineHello)
    assert events[0].block_size == 32
    assert re.fullmatch("sha256 [0-9a-f]{8}", events[0].hashing)
    assert [seq for seq, _ in router.batches] == list(range(len(router.batches)))
    started = [e for e in events if isinstance(e, RequestStarted)]
    finished = [e for e in events if isinstance(e, RequestFinished)]
    assert len(started) == len(finished) == 36
    assert started[0].segments[0].layer == 2
    assert started[0].session == "hot-a"
    stored = {k for e in events if isinstance(e, BlocksStored) for k in _keys(e.hashes)}
    removed = {k for e in events if isinstance(e, BlocksRemoved) for k in _keys(e.hashes)}
    assert removed < stored
    assert {k for e in finished for k in _keys(e.hashes)} == stored
    assert any(isinstance(e, AdviceApplied) and e.moved for e in events)


def _keys(packed: bytes) -> list[int]:
    return [int(k) for k in np.frombuffer(packed, dtype="<u8")]


@pytest.mark.parametrize("hints", ["off", "all"])
def test_no_sidecar_and_the_users_own_connector(
    stock: Any, new_engine: Any, tiny_model: Path, socket_directory: Path, hints: str
) -> None:
    """As in stock vLLM; but what callers state as protected, and may, is kept all the same."""
    endpoint = f"ipc://{socket_directory}/nobody"
    options = {"model": str(tiny_model), "user_connector": True, "pause_s": 0.2}
    run = new_engine(
        SCRIPT, options, AITHER_KVCACHE_GRAPH="1", AITHER_KVCACHE_SIDECAR=endpoint,
        AITHER_KVCACHE_HINTS=hints,
    ).run()  # fmt: skip
    assert run.result["texts"] == stock.result["texts"]
    assert (run.result["cached"] > stock.result["cached"]) is (hints == "all")
    assert run.result["cached"] >= stock.result["cached"]
    assert run.result["connector"] == "UserConnector"
    assert run.result["observed"]
    steps, finished, params_seen = run.result["user_calls"]
    assert steps >= 36
    assert finished == 36
    assert params_seen >= 36
    assert bool(run.result["applied"]["moved"]) is (hints == "all")
    assert run.result["applied"]["stale"] > 0
    assert run.result["queue_is_whole"]
    said = [line for line in run.lines("kvgraph: ") if "not allowed by" not in line]
    assert len(said) == 1
    assert "no sidecar answers" in said[0]


def test_the_child_sidecar_is_killed_mid_run_and_ends_with_the_engine(
    stock: Any, new_engine: Any, tiny_model: Path, wait_gone: Callable[[str], None]
) -> None:
    """With nothing but the switch, over several processes: API side, engine core, sidecar."""
    run = new_engine(
        SCRIPT, {"model": str(tiny_model), "kill_sidecar": True},
        AITHER_KVCACHE_GRAPH="1", AITHER_KVCACHE_WARM_GIB="0.1",
        VLLM_ENABLE_V1_MULTIPROCESSING="1",
    ).run()  # fmt: skip
    assert run.result["texts"] == stock.result["texts"]
    assert len(run.lines("listens on")) == 2, "the first, and the one started in its place"
    assert len(run.lines("ended unexpectedly")) == 1
    assert run.lines("engine linked to the sidecar")
    assert run.lines("tiers on:")
    assert run.result["sidecar"].startswith("ipc://")
    wait_gone(run.result["sidecar"])


@pytest.fixture
def wait_gone() -> Callable[[str], None]:
    """Waits until no process serves an endpoint any more."""
    import psutil

    def serving(endpoint: str) -> bool:
        lines = (p.info["cmdline"] or [] for p in psutil.process_iter(["cmdline"]))
        return any(endpoint in line for line in lines)

    def wait(endpoint: str) -> None:
        deadline = time.monotonic() + 10
        while serving(endpoint):
            assert time.monotonic() < deadline, "the sidecar outlived its engine"
            time.sleep(0.1)

    return wait


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_keys_that_are_moved_are_those_that_the_engine_computes_there(
    new_engine: Any, tiny_model: Path, dtype: str
) -> None:
    options = {"model": str(tiny_model), "dtype": dtype}
    assert new_engine("engine_kernels.py", options).run().result["error"] < 0.01
