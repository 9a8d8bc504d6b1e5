"""The kernels import where nothing else of ours is installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

KERNELS = Path(__file__).parents[2] / "kernels"


def test_kernels_need_nothing_but_torch_numpy_and_cuda_core() -> None:
    modules = [
        ".".join(["kvgraph.kernels", *path.relative_to(KERNELS).with_suffix("").parts])
        for path in sorted(KERNELS.rglob("*.py"))
    ]
    code = f"""
import importlib, sys
missing = ("msgspec", "zmq", "orjson", "vllm", "typer", "rich", "fastapi", "prometheus_client")
sys.modules.update(dict.fromkeys(missing))
for name in {modules!r}:
    importlib.import_module(name)
"""
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
