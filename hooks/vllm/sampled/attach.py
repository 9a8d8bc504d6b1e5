"""Finds the model runners whose decode steps are sampled."""

from __future__ import annotations

import functools
import importlib
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from ...settings import sampling_share
from ..shapes import is_full_attention, reason_for_no_samples

if TYPE_CHECKING:
    from .runners import Runner

logger = logging.getLogger(__name__)

_MOST_LAYERS: Final = 16  # sampled of a model; chosen
_MARK: Final = "_kvgraph_wrapped"
_READ: Final = ("CPU_ATTN", "FLASH_ATTN", "FLASHINFER", "TRITON_ATTN")  # caches that we describe


def follow_runners() -> None:
    """Have every model runner that is made from now on sample decode steps, where that is asked
    for."""
    if not sampling_share():
        return
    from .runners import RunnerV1, RunnerV2

    _follow("vllm.v1.worker.gpu_model_runner", RunnerV1)
    _follow("vllm.v1.worker.gpu.model_runner", RunnerV2)


def _follow(module: str, seen_as: Callable[[Any], Runner]) -> None:
    try:
        runners = importlib.import_module(module).GPUModelRunner
    except Exception:  # then no engine here has such a runner
        logger.debug("kvgraph: %s cannot be imported", module, exc_info=True)
        return
    original = runners.initialize_kv_cache
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def initialize(self: Any, config: Any, is_profiling: bool = False, **kwargs: Any) -> None:
        original(self, config, is_profiling, **kwargs)
        if is_profiling:  # this memory is given back
            return
        try:
            sample_steps(seen_as(self))
        except Exception as error:
            logger.warning(
                "kvgraph: no decode step is sampled (%s: %s)", type(error).__name__, error
            )

    setattr(initialize, _MARK, True)
    runners.initialize_kv_cache = initialize


def sample_steps(runner: Runner) -> None:
    """Sample decode steps of ``runner`` from now on.

    Raises:
        TypeError: This engine cannot be sampled; says why.
        LayoutError: Its cache is laid out in a way that is not known.
        BuildError: It is on a GPU, and the kernels that read it cannot be compiled.
    """
    from ..tiers.worker import described, rope_of
    from .measuring import Measuring
    from .sampler import SampledLayer, SamplingBudget, StepSampler, StepTimes

    config = runner.model_runner.vllm_config
    if reason := reason_not_to_sample(runner):
        raise TypeError(reason)
    layers = config.compilation_config.static_forward_context
    views = {name: layers[name].kv_cache for name in _names(runner)}
    names = sorted(views, key=lambda name: int(views[name].storage_offset()))
    able = [SampledLayer(at, layers[name].impl) for at, name in enumerate(names)]
    chosen = able[:: -(-len(able) // _MOST_LAYERS)]
    cache, cpu, times = described(views, config), time.process_time, None
    if cache.layout.tokens != runner.block_size:
        raise TypeError(f"its attention takes blocks in parts of {runner.block_size} tokens")
    budget = SamplingBudget(time.monotonic, cpu, sampling_share())
    if cache.memory.is_cuda:
        sizes = config.compilation_config.cudagraph_capture_sizes or ()
        times = StepTimes(time.monotonic, sorted(sizes))
        busy = times.busy
        budget = SamplingBudget(time.monotonic, busy, sampling_share(), strict=True)
    measuring = Measuring(cache, rope_of(config))
    measuring.warm_up(config.model_config.get_vocab_size())
    StepSampler(runner, measuring, chosen, budget, cpu, times).attach()
    logger.info("kvgraph: decode steps are sampled, %d layers of %d", len(chosen), len(able))


def reason_not_to_sample(runner: Runner) -> str | None:
    """Why this engine's steps cannot be sampled; None if they can."""
    config, groups = runner.model_runner.vllm_config, runner.model_runner.kv_cache_config
    if reason := reason_for_no_samples(config):
        return reason
    if config.kv_transfer_config is None:
        return "samples travel through kvgraph's connector, and this engine has none"
    spec = groups.kv_cache_groups[0].kv_cache_spec
    chunked = getattr(spec, "attention_chunk_size", None)
    if len(groups.kv_cache_groups) != 1 or chunked or not is_full_attention(spec):
        return "only models whose layers all have full attention are sampled"
    layers = config.compilation_config.static_forward_context
    reasons = (_reason_of_layer(layers[name]) for name in _names(runner))
    return next((reason for reason in reasons if reason), None)


def _reason_of_layer(layer: Any) -> str | None:
    backend = layer.get_attn_backend().get_name()
    if backend not in _READ:
        return f"{backend} keeps its cache in a way that is not known; known: {', '.join(_READ)}"
    if layer.sliding_window is not None:
        return "a layer has a sliding window; only layers with full attention are sampled"
    if layer.impl.alibi_slopes is not None or layer.impl.logits_soft_cap:
        return "a layer has ALiBi slopes or caps its logits, which is not measured"
    return None


def _names(runner: Runner) -> list[str]:
    (group,) = runner.model_runner.kv_cache_config.kv_cache_groups
    return list(group.layer_names)
