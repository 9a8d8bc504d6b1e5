"""One real vLLM engine in a process of its own, for the engine tests: runs a fixed workload."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

from one_engine import generate, new_llm, run_program, user_connector

HOT, ONCE = ("hot-a", "hot-b"), 4  # sessions that return each round, and prompts that never do

Turn = tuple[str, list[int], dict[str, Any]]


def main(options: dict[str, Any]) -> dict[str, Any]:
    """Serve the workload one request at a time, with ``faults`` if asked."""

    llm = new_llm(
        options["model"],
        blocks=40,
        kv_transfer_config=user_connector() if options.get("user_connector") else None,
    )
    turns = list(workload(options.get("rounds", 6)))
    texts, cached = [], 0
    for number, turn in enumerate(turns):
        if options.get("kill_sidecar") and number == len(turns) // 2:
            _wait_for_sidecar()
            _kill_sidecar()
        output = _serve(llm, turn)
        texts.append(list(output.outputs[0].token_ids))
        cached += output.num_cached_tokens or 0
        time.sleep(options.get("pause_s", 0.0))
    if options.get("kill_sidecar"):
        _wait_for_sidecar()
    return {"texts": texts, "cached": cached, **_state(llm)}


def workload(rounds: int) -> Iterator[Turn]:
    """Two returning sessions, and between their turns more one-off prompts than the pool holds."""
    for turn in range(rounds):
        for number, session in enumerate(HOT):
            tag = {"segments": [{"layer": "rules", "start": 0, "end": 224}]}
            yield session, [3 + number, *range(10, 233)], tag
        for number in range(ONCE):
            first = 3 + (turn * ONCE + number) % 400
            yield f"once-{turn}-{number}", [first, 9, *range(20, 242)], {"session_ended": True}


def _serve(llm: Any, turn: Turn) -> Any:
    session, prompt, tag = turn
    params = {"kvgraph": {"session": session, **tag}, "mine": True}
    return generate(llm, prompt, 8, extra_args={"kv_transfer_params": params})


def _state(llm: Any) -> dict[str, Any]:
    state: dict[str, Any] = {
        "modules": sorted(name for name in sys.modules if name.startswith("kvgraph.")),
        "sidecar": os.environ.get("AITHER_KVCACHE_SIDECAR"),
    }
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    if core is not None:  # else the scheduler lives in another process
        state |= _scheduler_state(core.scheduler)
    return state


def _scheduler_state(scheduler: Any) -> dict[str, Any]:
    from kvgraph.hooks.vllm.patches import WATCH

    queue = scheduler.kv_cache_manager.block_pool.free_block_queue
    free = queue.get_all_free_blocks()
    connector = scheduler.connector
    ours = getattr(connector, WATCH, connector)
    state = {
        "connector": type(connector).__name__,
        "observed": ours is not connector,
        "user_calls": [connector.steps, connector.finished, connector.params_seen]
                      if type(connector).__name__ == "UserConnector" else [],
        "defer_block_free": scheduler.defer_block_free,
        "requires_kv_delivery": scheduler.requires_kv_delivery,
        "queue_is_whole": len(free) == queue.num_free_blocks == len({b.block_id for b in free}),
    }  # fmt: skip
    side = getattr(ours, "side", None)
    if side is not None:
        for told in side.heartbeat(side.client.dropped)[1:]:
            name = "applied" if type(told).__name__ == "AdviceApplied" else "tiers"
            state[name] = {field: getattr(told, field) for field in told.__struct_fields__}
        state["garbage"] = side.client.garbage
    return state


def _wait_for_sidecar() -> None:
    from kvgraph.hooks.doctor.command import check_sidecar

    endpoint = os.environ["AITHER_KVCACHE_SIDECAR"]
    for _ in range(60):
        if check_sidecar(endpoint, timeout_s=1.0).ok:
            return
    raise SystemExit("no sidecar became ready")


def _kill_sidecar() -> None:
    import psutil

    for child in psutil.Process().children(recursive=True):
        if "kvgraph" in child.cmdline() and "serve" in child.cmdline():
            os.kill(child.pid, signal.SIGKILL)
            return
    raise SystemExit("there is no sidecar to kill")


if __name__ == "__main__":
    run_program(main)
