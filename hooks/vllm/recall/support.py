"""Decides whether an engine can have recall, and sets it up."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import numpy as np

from ....graph.errors import ConfigError
from ....kernels.errors import RopeError, StorageError
from ....kernels.rope import rope_from_config
from ...recall.gate import Calibration, calibration_file, identity_of, load
from ...recall.spans import SpanIndex
from ...settings import engine_settings
from ...threads import Once
from ..tiers.worker import weights_of
from .opt_in import OptIn
from .own_text import ExactOnly
from .recall import SpanRecall

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

    from ...requests.hints import CheckedHints
    from ..calls import BlockIds, Found, Told
    from ..groups import ObservedGroup
    from ..tiers.bridge import TierCacheBridge


def model_identity(model: ModelConfig, max_model_len: int | None) -> str:
    """Digest a model's weights and rotation for calibrations. Raises RopeError or StorageError."""
    rope = rope_from_config(model.hf_config, max_model_len)
    return identity_of(weights_of(model), (rope.inv_freq.tolist(), rope.start, rope.pairing.value))


logger = logging.getLogger(__name__)

MOST_TOKENS: Final = 1 << 22  # tokens kept: some 250 MiB in blocks of 16; chosen
_REFUSED: Final = "kvgraph: no recall in this engine: %s"


class RefusedRecall:
    """Tells each request that asks for recall why this engine has none, and logs one warning."""

    def __init__(self, reason: str, opt_in: OptIn) -> None:
        self._reason, self._opt_in, self._once = reason, opt_in, Once(logger)
        self._refused: set[str] = set()

    def get_num_new_matched_tokens(self, request: Request, _: int, found: Found) -> Found:
        asks = self._opt_in.domain(request) is not None
        if asks or self._opt_in.has_no_owner(request.request_id):
            self._once.warn("refused", _REFUSED, self._reason)
            self._refused.add(request.request_id)
        return found

    def request_finished(self, request: Request, _: BlockIds) -> Told:
        request_id = request.request_id
        self._opt_in.forget(request_id)
        if request_id not in self._refused:
            return None
        self._refused.discard(request_id)
        return {"kvgraph": {"recall": {"refused": self._reason}}}


def new_recall(
    config: VllmConfig,
    group: ObservedGroup,
    bridge: TierCacheBridge | None,
    manager: KVCacheManager | None,
    meaning: Callable[[Request], CheckedHints],
) -> SpanRecall | RefusedRecall | None:
    """Create recall for an engine's tiers, or an object that refuses it; None if it is off."""
    settings = engine_settings("recall", "recall_shared", "recall_always")
    everybody = settings.recall is True
    if settings.recall is False:
        return None
    if bridge is None or manager is None:
        if everybody:
            logger.warning(_REFUSED, "it has no tiers, and what comes back is read from copies")
        return None
    opt_in = OptIn(everybody, meaning, settings.recall_shared)
    try:
        calibration = calibration_for(config)
    except (ConfigError, RopeError, StorageError) as error:
        level = logging.WARNING if everybody else logging.INFO
        logger.log(level, _REFUSED, str(error))  # as text: a kept exception would keep the engine
        return RefusedRecall(str(error), opt_in)
    most = MOST_TOKENS // group.block_size
    shortest = calibration.limits.least_tokens
    index = SpanIndex(group.block_size, most, np.random.default_rng(), shortest)
    bridge.ledger.costs.splices_always = settings.recall_always
    logger.info("kvgraph: recall is possible: %s", calibration.reason)
    return SpanRecall(
        group, bridge.ledger, bridge.loader, bridge.spiller, index, calibration.limits, opt_in,
        ExactOnly(manager),
    )  # fmt: skip


def calibration_for(config: VllmConfig) -> Calibration:
    """Return the model's calibration, which allows recall.
    Raises ConfigError, RopeError or StorageError.
    """
    if config.speculative_config is not None:
        raise ConfigError("it drafts tokens, and what drafts read is not calibrated")
    identity = model_identity(config.model_config, config.model_config.max_model_len)
    calibration = load(identity, calibration_file(identity, os.environ))
    if not calibration.passed:
        raise ConfigError(f"the model did not pass its calibration: {calibration.reason}")
    return calibration
