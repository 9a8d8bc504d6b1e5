"""What a held request costs a step of vLLM's scheduler."""

from __future__ import annotations

import copy
import time
from statistics import median
from typing import TYPE_CHECKING, Final

from kvgraph.graph.wire.advice import AdmissionAdvice
from kvgraph.hooks.vllm.patches import bind_scheduler

from ..paper.paper_engine import PaperEngine, Shape, base_config
from ..paper.quiet import only_errors
from ..serving.model import TINY, ensure_model

if TYPE_CHECKING:
    from vllm.config import VllmConfig

HELD: Final = (100, 1000)
_STEPS: Final = 300
_REPEATS: Final = 9
_PROMPT_BLOCKS: Final = 8


@only_errors()
def measure_hold() -> dict[int, list[float]]:
    """Microseconds a step for each held request, by how many are held.

    The difference between a decode step with so many held and one with none, of vLLM's own
    scheduler with ours, above workers on paper.
    """
    config = base_config(ensure_model(TINY))
    alone = _steps(config, 0)
    return {count: [(s - median(alone)) / count for s in _steps(config, count)] for count in HELD}


def _steps(config: VllmConfig, held: int) -> list[float]:
    """Microseconds that steps take while ``held`` requests wait."""
    engine = PaperEngine(_roomy(config), Shape(blocks=257, warm=None))
    try:
        bind_scheduler(engine.scheduler)
        engine.ask(range(100), 400)
        engine.step()
        _shut(engine)
        for number in range(held):
            engine.ask([number, *range(16 * _PROMPT_BLOCKS)], 1)
        return [_timed(engine) for _ in range(_REPEATS)]
    finally:
        engine.close()


def _roomy(config: VllmConfig) -> VllmConfig:
    config = copy.copy(config)
    config.model_config = copy.copy(config.model_config)
    config.model_config.max_model_len = 4096
    return config


def _timed(engine: PaperEngine) -> float:
    steps = _STEPS // _REPEATS
    took = 0.0
    for _ in range(steps):
        began = time.thread_time()
        order = engine.scheduler.schedule()
        took += time.thread_time() - began
        engine.dispatch(order)
        engine.end(engine.batches.popleft())
        _shut(engine)
    return took / steps * 1e6


def _shut(engine: PaperEngine) -> None:
    now = time.monotonic()
    engine.side.client.hold_admission(AdmissionAdvice(1, now, 0, 2, 1, now))
