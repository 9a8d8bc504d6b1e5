"""Which file a worker's disk tier uses, and all that the bytes in it depend on."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ....kernels.errors import StorageError
from ....kernels.store.disk import DiskTier
from ...tiers.budget import DISK_SUFFIX, FILE_PREFIX, TierSettings
from ...tiers.disk_orphans import DiskOrphans, DiskSweep

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

    from ....kernels.layout.layout import PagedKv

logger = logging.getLogger(__name__)

_WEIGHTS: Final = (
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".tensors"
)  # fmt: skip
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


def disk_identity(config: VllmConfig) -> str:
    """Describe all that the bytes on the workers' disks depend on, except each worker's share of a
    block.

    Raises:
        StorageError: The weights cannot be told from others.
    """
    import vllm

    parallel = config.parallel_config
    parts = (
        vllm.__version__,
        config.model_config.compute_hash(),
        weights_of(config.model_config),
        _draft(config),
        config.cache_config.cache_dtype,
        config.cache_config.prefix_caching_hash_algo,
        (parallel.tensor_parallel_size, parallel.pipeline_parallel_size),
    )
    return repr(parts)


def _draft(config: VllmConfig) -> object:
    """Describe what tells a draft model from others: its layers may share the blocks."""
    speculative = config.speculative_config
    model = speculative.draft_model_config if speculative is not None else None
    if model is None or model.model == config.model_config.model:
        return None
    return model.compute_hash(), weights_of(model)


def weights_of(model: ModelConfig) -> object:
    """Describe what tells a model's weights from others of the same name and shape, without reading
    them.

    Raises:
        StorageError: Nothing does: there is no file of weights, and no commit of a hub.
    """
    path = Path(model.model)
    files = sorted(_files(path))
    commit = getattr(model.hf_config, "_commit_hash", None)
    if path.exists() and not any(name.endswith(_WEIGHTS) for name, *_ in files):
        raise StorageError(f"{path} holds no weights, so new ones would not be noticed")
    if not path.exists() and commit is None:
        raise StorageError(f"{path} has no commit, so new weights would not be noticed")
    return commit, files


def _files(path: Path) -> Iterator[tuple[str, str, int, int]]:
    """List each file's name, what its links lead to, its size and its time."""
    if path.is_file():
        yield _stat(path, path.name)
    seen: set[str] = set()
    for folder, below, names in os.walk(path, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:  # a link to a folder above
            below.clear()
            continue
        seen.add(real)
        files = [Path(folder, name) for name in names]
        yield from (_stat(file, str(file.relative_to(path))) for file in files if file.is_file())


def _stat(file: Path, name: str) -> tuple[str, str, int, int]:
    stat = file.stat()
    return name, os.path.realpath(file), stat.st_size, stat.st_mtime_ns
