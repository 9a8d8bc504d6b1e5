"""Finds the model runners whose decode steps are sampled."""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from ...settings import engine_settings
from ..patching import after
from ..shapes import is_full_attention, reason_for_no_samples

if TYPE_CHECKING:
    from .runners import Runner

logger = logging.getLogger(__name__)

_MOST_LAYERS: Final = 16  # most layers that are sampled; chosen
# Attention back ends whose cache layout is known.
_READ: Final = ("CPU_ATTN", "FLASH_ATTN", "FLASHINFER", "TRITON_ATTN")


def follow_runners() -> None:
    """Make runners created from now on sample decode steps, if the settings ask for it."""
    if not engine_settings("sampling").sampling:
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

    def sample(_: None, runner: Any, config: Any, is_profiling: bool = False, **__: Any) -> None:
        if not is_profiling:  # whose memory is given back
            sample_steps(seen_as(runner))

    after(runners, "initialize_kv_cache", sample, "no decode step is sampled")


def sample_steps(runner: Runner) -> None:
    """Sample ``runner``'s decode steps. Raises TypeError, LayoutError or BuildError."""
    from ..tiers.worker import described, rope_of
    from .measuring import StepMeasurer
    from .sampler import SampledLayer, SamplingBudget, StepSampler, StepTimes

    config, share = runner.model_runner.vllm_config, engine_settings().sampling
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
    budget = SamplingBudget(time.monotonic, cpu, share)
    if cache.memory.is_cuda:
        sizes = config.compilation_config.cudagraph_capture_sizes or ()
        times = StepTimes(time.monotonic, sorted(sizes))
        busy = times.busy
        budget = SamplingBudget(time.monotonic, busy, share, strict=True)
    measuring = StepMeasurer(cache, rope_of(config))
    measuring.warm_up(config.model_config.get_vocab_size())
    StepSampler(runner, measuring, chosen, budget, cpu, times).attach()
    logger.info("kvgraph: decode steps are sampled, %d layers of %d", len(chosen), len(able))


def reason_not_to_sample(runner: Runner) -> str | None:
    """Return why this engine's steps cannot be sampled; None if they can."""
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
