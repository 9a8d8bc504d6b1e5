"""How much memory copies may have: what the machine and the container have for all workers."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvgraph.hooks.tiers.host import available_bytes, share_of

GIB = 1 << 30


def machine(root: Path, available_gib: int, groups: str = "") -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(
        f"MemTotal: 999999999999 kB\nMemAvailable: {available_gib << 20} kB\n"
    )
    (root / "proc/self/cgroup").write_text(groups)
    return root


def put(root: Path, **numbers: dict[str, int | str]) -> None:
    """Files of control groups, by the group's path."""
    for group, values in numbers.items():
        folder = root / "sys/fs/cgroup" / group.replace("__", "/")
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in values.items():
            (folder / name).write_text(f"{value}\n")


def test_without_a_control_group_the_machine_decides(tmp_path: Path) -> None:
    assert available_bytes(machine(tmp_path, 64)) == 64 * GIB


def test_the_narrowest_group_decides_and_its_file_cache_counts_as_free(tmp_path: Path) -> None:
    root = machine(tmp_path, 512, "0::/pods/engine\n")
    put(
        root,
        pods={"memory.max": 100 * GIB, "memory.current": 70 * GIB,
              "memory.stat": f"anon 5\ninactive_file {10 * GIB}"},
        pods__engine={"memory.max": "max", "memory.current": 60 * GIB},
    )  # fmt: skip
    assert available_bytes(root) == 40 * GIB


def test_groups_of_the_older_kind_are_read_too(tmp_path: Path) -> None:
    root = machine(tmp_path, 512, "5:cpu:/x\n4:memory:/job/7\n0::/\n")
    put(
        root,
        memory={"memory.limit_in_bytes": 9223372036854771712},
        memory__job__7={"memory.limit_in_bytes": 32 * GIB, "memory.usage_in_bytes": 12 * GIB,
                        "memory.stat": f"total_inactive_file {2 * GIB}"},
    )  # fmt: skip
    assert available_bytes(root) == 22 * GIB


def test_a_group_that_is_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    root = machine(tmp_path, 512, "0::/\n")
    (root / "sys/fs/cgroup").mkdir(parents=True)
    (root / "sys/fs/cgroup/memory.max").write_text(str(GIB))
    (root / "sys/fs/cgroup/memory.current").write_text(str(2 * GIB))
    assert available_bytes(root) == 0


@pytest.mark.parametrize(("sharers", "given"), [(1, 64), (8, 14.4)])
def test_workers_share_what_there_is(tmp_path: Path, sharers: int, given: float) -> None:
    """Eight workers that are given 64 GiB each would be 512: on a machine of 128, each has less."""
    root = machine(tmp_path, 128)
    assert share_of(64 * GIB, sharers, root) == int(given * GIB)
