"""The documented Ray Serve deployment, in a network of its own, before engines that are not."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "ray_serve.md"
PROGRAM = Path(__file__).parent / "programs" / "ray_fleet.py"
ALONE = ["unshare", "--map-root-user", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]


def has_networks_of_its_own() -> bool:
    return shutil.which("unshare") is not None and not subprocess.call(
        [*ALONE, "true"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None,
        reason="Ray is not installed: pip install 'kvgraph[ray]'",
    ),
    pytest.mark.skipif(
        not has_networks_of_its_own(),
        reason="Ray listens beyond loopback, and no process gets a network of its own here",
    ),
]


def documented() -> str:
    """The program that the page shows."""
    return PAGE.read_text().split("```python\n", 1)[1].split("```", 1)[0]


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose name leaves room for Ray's in a socket's path."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.mark.timeout(900)
def test_sessions_find_home_in_the_documented_deployment(tmp_path: Path, short: Path) -> None:
    (tmp_path / "fleet.py").write_text(documented())
    stand_in = f"{sys.executable} -m kvgraph_bench.fleet.fleet_latency {{port}}"
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {
        **os.environ,
        "FLEET_ENGINE": stand_in, "FLEET_ENGINES": "2", "FLEET_GPUS": "0",
        "RAY_TMPDIR": str(short), "PYTHONPATH": os.pathsep.join(paths),
        "RAY_USAGE_STATS_ENABLED": "0",
    }  # fmt: skip
    done = subprocess.run(
        [*ALONE, sys.executable, str(PROGRAM)],
        env=env, cwd=tmp_path, capture_output=True, text=True, timeout=800,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["statuses"] == [200] * 18
    homes = [set(replicas) for replicas in found["homes"].values()]
    assert all(len(replicas) == 1 for replicas in homes)
    assert len(set.union(*homes)) == 2
