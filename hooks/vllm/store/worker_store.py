"""A worker's records in the shared store, and all that the bytes in them depend on."""

from __future__ import annotations

import hashlib
import logging
from typing import TYPE_CHECKING, Final

from ....kernels.errors import StorageError
from ...store.sealed_records import SealedRecords
from ...store.shared_store import open_store
from ...store.store_settings import StoreSettings
from ..transfers.kv_identity import disk_identity

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from ....kernels.layout.layout import PagedKv

logger = logging.getLogger(__name__)

_NAME_DIGITS: Final = 32  # 128 bits: of all models that ever share a store; chosen


def open_records(
    config: VllmConfig, settings: StoreSettings, cache: PagedKv
) -> tuple[SealedRecords, str] | None:
    """Open the store for this worker's shard; the records, and their name. None, and the reason
    logged, if that is impossible."""
    try:
        name = records_name(config, cache)
        records = SealedRecords(open_store(settings), name)
    except StorageError as error:
        logger.warning("kvgraph: no shared store: %s", error)
        return None
    logger.info("kvgraph: what is computed is shared in %s", settings.place)
    return records, name


def records_name(config: VllmConfig, cache: PagedKv) -> str:
    """Return what every worker on any machine calls records whose bytes would be these.

    They depend on the model, its weights, and this worker's share of a block: its rank among those
    of one engine, and the layout of its cache.

    Raises:
        StorageError: The weights cannot be told from others.
    """
    whole = repr((disk_identity(config), config.parallel_config.rank, cache.layout.record(1)))
    return hashlib.sha256(whole.encode()).hexdigest()[:_NAME_DIGITS]
