"""A real CPU engine whose cache we read and write: what was overwritten comes back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine
TESTS = Path(__file__).parent


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_spilled_overwritten_warmed_the_text_continues_identically(
    tiny_model: Path, dtype: str
) -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith("AITHER_")}
    env |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = subprocess.run(
        [sys.executable, "-P", str(TESTS / "engine_kernels.py"), str(tiny_model), dtype],
        env=env, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    line = next(ln for ln in done.stdout.splitlines() if ln.startswith("RESULT "))
    result = json.loads(line.removeprefix("RESULT "))
    assert result["cached"]["warmed"] == result["cached"]["first again"] > 0
    assert result["texts"]["warmed"] == result["texts"]["first again"]
    assert result["texts"]["spoiled"] != result["texts"]["first again"], "the cache is what is read"
    assert result["changed_bytes"] == 0
    assert result["spliced_equals_recomputed"] < 0.01
