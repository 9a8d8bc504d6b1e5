"""The order of a cache's axes that tiers ask vLLM for: all layers of a block in one run."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from ..settings import TIERS_KEY

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

BLOCKS_OUTERMOST: Final = "BLHNC"
"""vLLM's name for it: a block is one copy there, and one per layer in the usual orders."""


def wanted_layout(config: VllmConfig) -> str | None:
    """Which order to ask for; None where any will do. Never raises: engines start with the answer.

    vLLM asks only if the user chose none (``VLLM_KV_CACHE_LAYOUT``), and takes its own choice, with
    a warning, where the attention backend cannot read this one.
    """
    try:
        return BLOCKS_OUTERMOST if _is_of_use(config) and _is_safe(config) else None
    except Exception as error:
        logger.debug("kvgraph: no order of the cache asked for: %s", type(error).__name__)
        return None


def _is_of_use(config: VllmConfig) -> bool:
    """Whether blocks are copied, and by a machine for which the order is not fixed anyway."""
    from vllm.platforms import current_platform

    transfer = config.kv_transfer_config
    tiers = transfer is not None and transfer.get_from_extra_config(TIERS_KEY, None)
    return bool(tiers) and not current_platform.is_cpu()


def _is_safe(config: VllmConfig) -> bool:
    """Whether no block has to be split.

    Attention that takes smaller blocks than the engine's is given parts of them. In this order
    other layers stand between a block and the next, and vLLM ends with an error. Of itself it
    chooses a size that attention takes whole; a user, or layers of another dtype, may not.
    """
    cache = config.cache_config
    return not cache.user_specified_block_size and not cache.kv_cache_dtype_skip_layers
