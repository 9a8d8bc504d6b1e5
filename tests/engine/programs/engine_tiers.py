"""One real vLLM engine, with the tiers' faults one after the other, or without tiers."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from one_engine import BLOCK, PATIENCE_S, SteppedEngine, run_program

CONTEXT = 7 * BLOCK  # tokens of a session that is parked
SPILLER_RESTS_S = 1.1  # after a copy that failed nothing is copied for a second
POOL = 24  # blocks
WARM, COLD = 3, 7  # sessions that push one out of the pool, and out of a memory of 40 blocks


class Stage(SteppedEngine):
    def __init__(self, model: str) -> None:
        super().__init__(model, POOL)
        self.model = Path(model)
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.preempted: set[str] = set()
        self._pushed = 0

    @property
    def tiers(self) -> bool:
        return self.connector is not None

    @property
    def loaded(self) -> float:
        return self.counts.get("loaded", 0)

    @property
    def demoted(self) -> float:
        return self.counts.get("demoted", 0)

    def step(self) -> None:
        super().step()
        running = self.scheduler.requests.values()
        self.preempted |= {r.request_id for r in running if r.num_preemptions}

    def serve_named(self, name: str, prompt: list[int]) -> list[bytes]:
        """Serve one request; what the engine calls its prompt's full blocks."""
        self.add(name, prompt)
        self.step()
        (request,) = self.scheduler.requests.values()
        self.until(lambda: name in self.answers)
        self.settle()
        return list(request.block_hashes[: len(prompt) // BLOCK])

    def push_out(self, prompts: int = WARM) -> None:
        """Other sessions take the whole pool."""
        for _ in range(prompts):
            self._pushed += 1
            self.serve(f"other-{self._pushed}", prompt(200 + self._pushed))

    def park(self, name: str, seed: int, prompts: int = WARM) -> list[int]:
        """A session's first turn, and then others, so that its blocks leave the pool."""
        self.serve(f"{name} first", prompt(seed))
        self.push_out(prompts)
        return [*prompt(seed), 7, 8, 9]

    def begin_load(self, name: str, prompt: list[int]) -> int:
        """A session comes back; how many requests wait for a load after a step."""
        from vllm.v1.request import RequestStatus

        self.add(name, prompt)
        self.step()
        waits = RequestStatus.WAITING_FOR_REMOTE_KVS
        return sum(r.status == waits for r in self.scheduler.requests.values())

    def restart(self) -> None:
        """All of ours anew, as in an engine that starts; its own prefix cache is empty then."""
        if not self.tiers:
            self.pool.reset_prefix_cache()
            return
        self.connector.detach(wait_s=1.0)
        self.settle()
        self.pool.reset_prefix_cache()
        worker = self.worker
        worker.close()
        worker.serve(worker.mover.cache)
        self.connector.bind_gpu_block_pool(self.pool)
        self.trust_no_cost()

    def whole(self) -> bool:
        """Every block is free, once, and the engine knows of no request any more."""
        free = self.pool.free_block_queue.get_all_free_blocks()
        count = self.pool.get_num_free_blocks()
        single = len(free) == count == len({block.block_id for block in free})
        return single and count == self.pool.num_gpu_blocks - 1 and not self.scheduler.requests


def prompt(seed: int) -> list[int]:
    return [3 + seed % 500, 3 + seed // 500, *range(10, 8 + CONTEXT)]


# Faults -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def held(stage: Stage, where: Any, name: str) -> Iterator[threading.Event]:
    """Calls of ``where.name`` wait until the event is set."""
    leave = threading.Event()
    real = getattr(where, name) if stage.tiers else None

    def waiting(*args: Any) -> Any:
        leave.wait(PATIENCE_S)
        return real(*args)

    with mock.patch.object(where, name, waiting) if stage.tiers else contextlib.nullcontext():
        try:
            yield leave
        finally:
            leave.set()


def failing(stage: Stage, where: Any, name: str) -> Any:
    """Calls of ``where.name`` fail; a transfer does so after its first block."""
    if not stage.tiers:
        return contextlib.nullcontext()
    real = getattr(where, name)

    def fail(*args: Any) -> Any:
        if args and hasattr(args[0], "numbers"):  # a transfer
            real(*(each._replace(numbers=each.numbers[:1]) for each in args))
        raise RuntimeError("an injected fault")

    return mock.patch.object(where, name, fail)


def no_space(*_: Any) -> int:
    raise OSError(28, "No space left on device")


# Scenes -----------------------------------------------------------------------------------------

Facts = dict[str, Any]


def returns(stage: Stage) -> Facts:
    """Nothing fails: a parked session comes back from memory, another from the disk."""
    cold = stage.park("cold", 1, prompts=COLD)
    computed = stage.serve("cold again", cold)
    warm = stage.park("warm", 2)
    return {"cold": computed, "warm": stage.serve("warm again", warm)}


def arena_full(stage: Stage) -> Facts:
    """The book believes in more room than there is."""
    context = stage.park("full", 11)
    if stage.tiers:
        stage.bridge.ledger.directory.warm_capacity += 1000
    stage.push_out(COLD)
    facts = {"computed": stage.serve("full again", context)}
    if stage.tiers:
        stage.bridge.ledger.directory.warm_capacity -= 1000
    stage.restart()
    return facts


def spill_fails(stage: Stage) -> Facts:
    from kvgraph.kernels import ops

    with failing(stage, ops, "spill"):
        context = stage.park("torn", 21)
    facts = {"computed": stage.serve("torn again", context)}
    time.sleep(SPILLER_RESTS_S)
    return facts


def load_fails(stage: Stage) -> Facts:
    from kvgraph.kernels import ops

    context = stage.park("half", 31)
    with failing(stage, ops, "load"):
        return {"computed": stage.serve("half again", context)}


def disk_corrupt(stage: Stage) -> Facts:
    context = stage.park("rotten", 41, prompts=COLD)
    if stage.tiers:
        disk = stage.worker.mover.lanes.disk.records
        records = disk.path.stat().st_size - disk.capacity * disk.record_bytes  # behind all else
        with disk.path.open("r+b") as file:
            for slot in range(disk.capacity):
                file.seek(records + slot * disk.record_bytes + 500)
                file.write(os.urandom(1000))
    return {"computed": stage.serve("rotten again", context)}


def disk_full(stage: Stage) -> Facts:
    """Nothing more reaches the disk until it has room again."""
    before = stage.demoted
    with mock.patch.object(os, "pwrite", no_space) if stage.tiers else contextlib.nullcontext():
        context = stage.park("lost", 51, prompts=COLD)
    demoted = stage.demoted - before
    return {"computed": stage.serve("lost again", context), "demoted": demoted}


def disk_slow(stage: Stage) -> Facts:
    """A session waits for the disk; others are served meanwhile."""
    context = stage.park("slow", 61, prompts=COLD)
    with held(
        stage, stage.worker.mover.lanes.disk.records if stage.tiers else None, "read"
    ) as leave:
        waits = stage.begin_load("slow again", context)
        stage.add("quick", prompt(62))
        stage.until(lambda: "quick" in stage.answers)
        waited = "slow again" not in stage.answers
        leave.set()
        stage.until(lambda: "slow again" in stage.answers)
    return {"waits": waits, "waited": waited}


def abort_during_load(stage: Stage) -> Facts:
    from kvgraph.kernels import ops

    context = stage.park("gone", 71)
    with held(stage, ops, "load") as leave:
        waits = stage.begin_load("gone again", context)
        stage.engine.abort_request(["gone again"])
        stage.step()
        kept = not stage.whole()
        leave.set()
        stage.settle()
    whole = stage.whole()
    return {"waits": waits, "kept": kept, "whole": whole,
            "computed": stage.serve("gone once more", context)}  # fmt: skip


def preemption(stage: Stage) -> Facts:
    """While a session loads, others grow until one is preempted, and comes back by a load."""
    from kvgraph.kernels import ops

    context = stage.park("patient", 81)
    with held(stage, ops, "load") as leave:
        waits = stage.begin_load("patient again", context)
        for number in range(3):
            stage.add(f"growing-{number}", prompt(82 + number), tokens=100)
        stage.until(lambda: stage.preempted)
        leave.set()
        stage.until(lambda: not stage.scheduler.has_requests())
    return {"waits": waits, "preempted": len(stage.preempted)}


def reset(stage: Stage) -> Facts:
    """New weights, and every cache emptied: nothing of before may be used."""
    context = stage.park("renewed", 91)
    runner = stage.engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    weights = runner.model.model.embed_tokens.weight.data
    weights.copy_(weights.roll(1, 0))
    done = stage.pool.reset_prefix_cache()
    before = stage.loaded
    computed = stage.serve("renewed again", context)
    loaded = stage.loaded - before
    # The checkpoint is the old one: what is on disk by now must not be taken for its KV.
    kept = stage.park("after all", 96, prompts=COLD)
    stage.restart()
    restarted = stage.serve("after all again", kept)
    return {"done": done, "computed": computed, "loaded": loaded, "restarted": restarted}


def restart_same(stage: Stage) -> Facts:
    context = stage.park("kept", 101, prompts=COLD)
    stage.restart()
    return {"computed": stage.serve("kept again", context)}


def restart_other(stage: Stage) -> Facts:
    context = stage.park("strange", 111, prompts=COLD)
    os.utime(stage.model / "model.safetensors")
    stage.restart()
    return {"computed": stage.serve("strange again", context)}


def idle_hour(stage: Stage) -> Facts:
    """Nothing evicts a session for an hour: by then it is on disk, and a restart finds it."""
    hashes = stage.serve_named("idle first", prompt(121))
    if stage.tiers:
        stage.bridge.ledger.clock = lambda: time.monotonic() + 3600.0
    for number in range(3):
        stage.serve(f"meanwhile {number}", prompt(122))
        time.sleep(SPILLER_RESTS_S)  # longer than copies of blocks take to be looked for
    facts: Facts = {}
    if stage.tiers:
        cached = stage.pool.cached_block_hash_to_block
        found = [cached.get_one_block(each + stage.connector.side.group.suffix) for each in hashes]
        facts["pool"] = len(found) - found.count(None)
        facts["disk"] = sum(map(stage.bridge.ledger.directory.is_cold, hashes))
    stage.restart()
    return {**facts, "computed": stage.serve("idle again", [*prompt(121), 7, 8, 9])}


def restart_warm(stage: Stage) -> Facts:
    """What only memory has when an engine ends is written then."""
    hashes = stage.serve_named("ended first", prompt(126))
    stage.push_out()
    facts: Facts = {}
    if stage.tiers:
        facts["disk"] = sum(map(stage.bridge.ledger.directory.is_cold, hashes))
    stage.restart()
    return {**facts, "computed": stage.serve("ended again", [*prompt(126), 7, 8, 9])}


SCENES = (
    returns, arena_full, spill_fails, load_fails, disk_corrupt, disk_full, disk_slow,
    abort_during_load, preemption, reset, restart_same, restart_other, idle_hour, restart_warm,
)  # fmt: skip


def main(options: dict[str, Any]) -> Facts:
    stage, scenes = Stage(options["model"]), dict[str, Facts]()
    for scene in SCENES:
        if scene.__name__ in options.get("scenes", [scene.__name__]):
            before = stage.counts
            facts = scene(stage)
            stage.settle()
            after = stage.counts
            # Where a scene ended in a restart, the counters began anew.
            facts["counts"] = {name: after[name] - before[name] for name in after}
            scenes[scene.__name__] = {"whole at the end": stage.whole(), **facts}
    return {"texts": {name: stage.text(name) for name in stage.answers}, "scenes": scenes}


if __name__ == "__main__":
    run_program(main)
