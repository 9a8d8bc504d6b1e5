"""Which file a worker's disk tier uses."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ....kernels.errors import StorageError
from ....kernels.store.disk import DiskTier
from ...tiers.budget import DISK_SUFFIX, FILE_PREFIX, TierSettings
from ...tiers.disk_orphans import DiskOrphans, DiskSweep
from .kv_identity import disk_identity

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from ....kernels.layout.layout import PagedKv

logger = logging.getLogger(__name__)

_DIGEST_DIGITS: Final = 12  # 48 bits in a file name; chosen


def open_disk(
    config: VllmConfig, settings: TierSettings, cache: PagedKv, record_bytes: int
) -> DiskTier | None:
    """Open the disk tier that ``settings`` ask for; None, and the reason logged, if that is
    impossible."""
    capacity = settings.cold_bytes // record_bytes
    if settings.cold_dir is None or not capacity:
        return None
    try:
        identity = disk_identity(config)
        path = settings.cold_dir / file_name(config, identity)
        whole = repr((identity, _place(config), cache.layout.record(1)))
        orphans = _orphans_beside(path)
        disk = orphans.make_room(lambda: DiskTier(path, record_bytes, capacity, whole))
        with contextlib.suppress(OSError, StorageError):  # a sweep may succeed later
            orphans.age_out(path)
        return disk
    except StorageError as error:
        logger.warning("kvgraph: no disk tier: %s", error)
        return None


def new_sweep(disk: DiskTier) -> DiskSweep:
    """Begin to sweep the directory of a worker's ``disk``."""
    return DiskSweep(disk.path, _orphans_beside(disk.path))


def file_name(config: VllmConfig, identity: str) -> str:
    """Return one name per model, per what its bytes depend on, and per worker's place."""
    engine, rank = _place(config)
    model = _digest(str(config.model_config.model))
    return f"{FILE_PREFIX}{model}-{_digest(identity)}-{engine}-{rank}{DISK_SUFFIX}"


def _orphans_beside(path: Path) -> DiskOrphans:
    """Return the files that are of no worker of the engine whose worker has ``path``."""
    own, *_ = path.name.rsplit("-", 2)
    return DiskOrphans(path.parent, f"{own}-")


def _place(config: VllmConfig) -> tuple[int, int]:
    # Of independent engines each has rank 0; the index is what tells them apart.
    parallel = config.parallel_config
    return parallel.data_parallel_index, parallel.rank


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_DIGITS]
