"""A real vLLM engine that has nothing to do takes an order: no request, and the copies are back."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvgraph.graph.wire.advice import EvictionRanking, PrefetchMessage
from kvgraph.graph.wire.events import BlocksLoaded, RequestFinished, RequestStarted

pytestmark = pytest.mark.engine
SCRIPT = "../idle/engine_idle.py"
BLOCK = 32
OTHERS = 6  # requests after the first, as in the script
PATIENCE_S = 60.0  # at most, for what the engine does within seconds
WARM_GIB = "0.02"
ROOM = 6  # blocks: a quarter of the pool may hold what was brought back and not hit, at first


def test_an_idle_engine_brings_copies_back_without_a_request(
    new_engine: Any, tiny_model: Path, router: Any, tmp_path: Path
) -> None:
    alone, back = tmp_path / "alone", tmp_path / "back"
    engine = new_engine(
        SCRIPT, {"model": str(tiny_model), "alone": str(alone), "back": str(back)},
        VLLM_ENABLE_V1_MULTIPROCESSING="1",
        AITHER_KVCACHE_GRAPH="1", AITHER_KVCACHE_SIDECAR=router.endpoint,
        AITHER_KVCACHE_WARM_GIB=WARM_GIB, AITHER_KVCACHE_ADMISSION="0",
    )  # fmt: skip
    router.read_until(lambda: ended(router) == 1 + OTHERS, timeout_s=240)
    router.read_until(alone.exists, PATIENCE_S)  # it was watched while there were no orders
    first = np.frombuffer(of_kind(router, RequestStarted)[0].hashes, dtype="<u8")[:ROOM]
    assert not of_kind(router, BlocksLoaded)
    order_until_back(router, first.tobytes())
    back.touch()
    loaded = b"".join(event.hashes for event in of_kind(router, BlocksLoaded))
    assert set(first.tolist()) <= set(np.frombuffer(loaded, dtype="<u8").tolist())
    assert len(of_kind(router, RequestStarted)) == 1 + OTHERS, "no request brought them"
    run = engine.run()
    assert run.result["same"]
    assert run.result["cached"] >= ROOM * BLOCK
    before, afterwards = run.result["cpu_s"]
    assert afterwards <= before + 0.5, "of three seconds: the engine rests again"


def order_until_back(router: Any, keys: bytes) -> None:
    """What a sidecar sends, twice a second, until the blocks are back; then an empty order."""
    deadline = time.monotonic() + PATIENCE_S
    epoch = 0
    while not of_kind(router, BlocksLoaded) and time.monotonic() < deadline:
        epoch += 1
        heard = router.batches[-1][0] + 1
        router.advise(replace(EvictionRanking.empty(0.0), epoch=epoch, heard=heard), 2 * epoch)
        router.advise(PrefetchMessage(keys), 2 * epoch + 1)
        router.read(0.5)
    router.advise(PrefetchMessage(b""), 2 * epoch + 2)
    router.read(0.5)


def ended(router: Any) -> int:
    return len(of_kind(router, RequestFinished))


def of_kind(router: Any, kind: type) -> list[Any]:
    return [event for event in router.events if isinstance(event, kind)]
