"""How much host memory this process may still take, by the machine and by its control group."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

_KEPT_SHARE: Final = 0.1  # of what is free stays free: the engine's own needs grow; chosen
_UNLIMITED: Final = 1 << 60  # control groups write "max", or a number that no machine has


def share_of(wanted: int, sharers: int, root: Path = Path("/")) -> int:
    """Bytes that each of ``sharers`` workers, all of which want ``wanted``, can have.

    Memory is committed when it is first used. A process that was promised more than there is would
    be killed by the kernel under load, hours after its start.
    """
    return min(wanted, int(available_bytes(root) * (1 - _KEPT_SHARE)) // sharers)


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes that can be taken without swapping, and without exceeding a control group's limit."""
    return max(0, min(_machine_bytes(root), *_group_bytes(root)))


def _machine_bytes(root: Path) -> int:
    lines = _read(root / "proc/meminfo").splitlines()
    free = (1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    return next(free, _UNLIMITED)


def _group_bytes(root: Path) -> Iterator[int]:
    """Bytes that each control group of this process, up to the outermost, leaves free."""
    yield _UNLIMITED
    mounts = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if not controllers:
            yield from _rooms(mounts, group, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            yield from _rooms(
                mounts / "memory", group, "memory.limit_in_bytes", "memory.usage_in_bytes",
                "total_inactive_file",
            )  # fmt: skip


def _rooms(mount: Path, group: str, limit: str, usage: str, cache: str) -> Iterator[int]:
    inner = mount / group.strip("/")
    for folder in (inner, *inner.parents):
        most = _number(folder / limit)
        if most is not None and most < _UNLIMITED:
            reclaimable = dict(
                line.split(maxsplit=1) for line in _read(folder / "memory.stat").splitlines()
            )
            yield most - (_number(folder / usage) or 0) + int(reclaimable.get(cache, 0))
        if folder == mount:
            return


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # not this kernel's layout, or not ours to see
        return ""
