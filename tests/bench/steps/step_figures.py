"""Figures of engine steps at production size, each beside stock's own step in the same process."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from kvgraph.hooks.link.mailbox import looked_up
from kvgraph.hooks.vllm.core_choice import reason_against
from kvgraph.hooks.vllm.free_queue.arranger import FreeQueueArranger

from ..figures import Figures
from ..hotpath import BLOCK_SIZE, cached_pool, connected, new_pool, request_maker
from .step_loop import Load, StepLoop, StepSidecar

STEPS: Final = 400
PREFILL_STEPS: Final = 60
POOL: Final = 200_000
SMALL_POOL: Final = 8_000
MOST_RUNNING: Final = 500
LONG_BLOCKS: Final = 8_000  # of one request: 128k tokens
BATCHED_TOKENS: Final = 16_384
REQUESTS: Final = 512
APPLY_POOL: Final = 100_000
REPEATS: Final = 9
BETWEEN_SESSIONS_S: Final = 0.5  # from one session to the next, while the pool fills; chosen


@dataclass(slots=True)
class Clock:
    """The engine's own: only its steps move it on."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True, slots=True)
class Paid:
    """What steps cost: microseconds beyond stock, and which share of evicted blocks had copies."""

    added_us: list[float]
    copied_share: float


def measure_steps(load: Load, steps: int, tiers: bool, spill_all: bool = False) -> Paid:
    """Our cost of each step under ``load``: the same step in turn with ours and without."""
    clock = Clock()
    tiers_of = load.pool if tiers else None
    stock = StepLoop(load)
    bounds = (BATCHED_TOKENS, REQUESTS)
    ours = StepLoop(load, lambda pool: connected(pool, tiers_of, clock, *bounds, spill_all))
    sidecar = StepSidecar(ours.connector.side, clock)

    def told() -> None:
        clock.now += BETWEEN_SESSIONS_S
        sidecar.hear()

    stock.fill(lambda: None)
    ours.fill(told)
    before = _uncopied(ours)
    evicted = sidecar.evicted
    gc.collect()
    gc.freeze()
    added = [_added(stock, ours, sidecar, clock) for _ in range(steps)]
    gc.unfreeze()
    lost = _uncopied(ours) - before
    return Paid(added, 1.0 - lost / max(1, sidecar.evicted - evicted))


def _added(stock: StepLoop, ours: StepLoop, sidecar: StepSidecar, clock: Clock) -> float:
    stock.prepare()
    ours.prepare()
    alone = stock.step()
    added = ours.step() - alone
    clock.now += ours.load.step_s
    sidecar.hear()
    return added * 1e6


def _uncopied(loop: StepLoop) -> int:
    """Blocks that were evicted without a copy though one was worth it."""
    ledger = getattr(loop.connector.side.bridge, "ledger", None)
    return 0 if ledger is None else int(ledger.counts.spill_lost)


def measure_finish() -> list[float]:
    """Microseconds that the end of a request of 8,000 blocks takes in our part."""
    return [_long_request()[0] for _ in range(REPEATS)]


def measure_waiting_lookup() -> list[float]:
    """Microseconds of each further lookup of such a request while it waits, with tiers."""
    return [_long_request()[1] for _ in range(REPEATS)]


def _long_request() -> tuple[float, float]:
    pool = new_pool(LONG_BLOCKS + 100)
    connector = connected(pool, LONG_BLOCKS, batched_tokens=BATCHED_TOKENS, requests=REQUESTS)
    request = request_maker()(list(range(LONG_BLOCKS * BLOCK_SIZE)))
    connector.on_new_request(request)
    connector.get_num_new_matched_tokens(request, 0)
    again = _timed(lambda: connector.get_num_new_matched_tokens(request, 0))
    blocks = pool.get_new_blocks(LONG_BLOCKS)
    connector.update_state_after_alloc(request, None, 0)
    pool.cache_full_blocks(request, blocks, 0, LONG_BLOCKS, BLOCK_SIZE, 0)
    request.num_computed_tokens = LONG_BLOCKS * BLOCK_SIZE
    ids = [block.block_id for block in blocks]
    return _timed(lambda: connector.request_finished_all_groups(request, (ids,))), again


def _timed(call: Callable[[], object]) -> float:
    began = time.thread_time()
    call()
    return (time.thread_time() - began) * 1e6


def measure_apply(compiled: bool) -> list[float]:
    """Microseconds for each block that a new ranking moves in a pool of 100,000."""
    from ..hotpath import a_ranking, apply_us_per_block

    pool, keys, index = cached_pool(APPLY_POOL, compiled=compiled)
    arranger = FreeQueueArranger(pool, index, blocks_per_step=768)
    shuffled, samples = np.random.default_rng(7), []
    for epoch in range(1, 4 * REPEATS):
        order = shuffled.permutation(keys)[:8192]
        ranking = looked_up(a_ranking(order, epoch), index.holders)  # as it arrives
        samples.append(apply_us_per_block(arranger, ranking))
    return samples


def add_steps(figures: Figures, say: Callable[[str], None]) -> None:
    found: dict[str, list[float]] = {}
    for name, load, steps, tiers, target in _SETTINGS:
        say(f"{load.running} running, pool of {load.pool:,}{', 16k-token prompts' * load.prefill}")
        found[name] = measure_steps(load, steps, tiers).added_us
        figures.add(name, found[name], "us", target)
        p99 = float(np.quantile(found[name], 0.99))
        figures.add(f"{name}_p99", p99, "us", "≤ 300" if load.running == MOST_RUNNING else "")
    observed, tiered = found["step_us_32"], found["step_us_32_tiers"]
    figures.add("observe_us_per_step", observed, "us", "≤ 20")
    figures.add("tiers_us_per_step", float(np.median(tiered) - np.median(observed)), "us")
    say("16k-token prompts, every block worth a copy")
    paid = measure_steps(Load(32, POOL, True, 0.5), PREFILL_STEPS, tiers=True, spill_all=True)
    figures.add("copied_share", paid.copied_share, "share", "≥ .9")
    say("one request of 8,000 blocks")
    figures.add("finish_us_8000", measure_finish(), "us", "≤ 800")
    figures.add("lookup_again_us_8000", measure_waiting_lookup(), "us")
    compiled = reason_against() is None
    figures.add("apply_us_per_block_100k", measure_apply(compiled), "us", "≤ 0.1")
    if compiled:
        figures.add("apply_us_per_block_100k_python", measure_apply(compiled=False), "us")


_SETTINGS: Final = (
    ("step_us_32", Load(32, SMALL_POOL), STEPS, False, ""),
    ("step_us_32_tiers", Load(32, SMALL_POOL), STEPS, True, ""),
    ("step_us_256", Load(256, POOL), STEPS, False, ""),
    ("step_us_256_tiers", Load(256, POOL), STEPS, True, ""),
    ("step_us_500", Load(MOST_RUNNING, POOL), STEPS, False, "≤ 40"),
    ("step_us_500_tiers", Load(MOST_RUNNING, POOL), STEPS, True, "≤ 80"),
    ("step_us_prefill", Load(32, POOL, True, 0.5), PREFILL_STEPS, False, ""),
    ("step_us_prefill_tiers", Load(32, POOL, True, 0.5), PREFILL_STEPS, True, "≤ 250"),
)
