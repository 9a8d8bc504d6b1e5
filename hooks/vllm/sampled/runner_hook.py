"""Finds the model runners whose decode steps are sampled."""

from __future__ import annotations

import functools
import logging
import time
from typing import TYPE_CHECKING, Any, Final

from ...reliance.fit import Part
from ...reliance.live_vllm import live_misfits
from ..settings import CONNECTOR, sampling_share

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

logger = logging.getLogger(__name__)

_MOST_LAYERS: Final = 16  # sampled of a model; chosen
_MARK: Final = "_kvgraph_wrapped"


def follow_runners() -> None:
    """Have every model runner that is made from now on sample decode steps, where that is asked
    for."""
    if not sampling_share():
        return
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    original = GPUModelRunner.initialize_kv_cache_tensors
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def initialize(self: GPUModelRunner, *args: Any, **kwargs: Any) -> dict[str, Any]:
        views: dict[str, Any] = original(self, *args, **kwargs)
        try:
            sample_steps(self, views)
        except Exception as error:
            logger.warning(
                "kvgraph: no decode step is sampled (%s: %s)", type(error).__name__, error
            )
        return views

    setattr(initialize, _MARK, True)
    GPUModelRunner.initialize_kv_cache_tensors = initialize


def sample_steps(runner: GPUModelRunner, views: dict[str, Any]) -> None:
    """Sample decode steps of ``runner`` from now on.

    Args:
        views: Its cache, one view per layer.

    Raises:
        TypeError: This engine cannot be sampled; says why.
    """
    from ..transfers.worker import described, rope_of
    from .sampling_budget import SamplingBudget
    from .step_sampler import SampledLayer, StepSampler

    if reason := reason_not_to_sample(runner):
        raise TypeError(reason)
    config = runner.vllm_config
    layers = runner.compilation_config.static_forward_context
    names = sorted(views, key=lambda name: int(views[name].storage_offset()))
    able = [SampledLayer(at, layers[name].impl) for at, name in enumerate(names)]
    chosen = able[:: -(-len(able) // _MOST_LAYERS)]
    cpu = time.process_time
    budget = SamplingBudget(time.monotonic, cpu, sampling_share())
    sampler = StepSampler(runner, described(views, config), chosen, rope_of(config), budget, cpu)
    sampler.warm_up()
    sampler.attach()
    logger.info("kvgraph: decode steps are sampled, %d layers of %d", len(chosen), len(able))


def reason_not_to_sample(runner: GPUModelRunner) -> str | None:
    """Why this engine's steps cannot be sampled; None if they can."""
    from vllm.platforms import current_platform

    if problems := live_misfits(Part.SAMPLING):
        return "; ".join(problems)
    config = runner.vllm_config
    transfer = config.kv_transfer_config
    if transfer is None or transfer.kv_connector != CONNECTOR:
        return "samples travel through kvgraph's connector, and this engine has another or none"
    if not current_platform.is_cpu():
        return "on a GPU a sampled step would need a dispatch of its own, which is not written yet"
    if config.parallel_config.world_size != 1:
        return "an engine with several workers shows each of them a part of its heads or layers"
    if config.speculative_config is not None:
        return "speculative tokens have several rows of logits per request"
    if config.model_config.use_mla or len(runner.kv_cache_config.kv_cache_groups) != 1:
        return "only models whose layers all have full attention are sampled"
    return None
