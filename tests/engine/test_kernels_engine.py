"""A real CPU engine whose cache we read and write: what was overwritten comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_spilled_overwritten_warmed_the_text_continues_identically(
    new_engine: Any, tiny_model: Path, dtype: str
) -> None:
    options = {"model": str(tiny_model), "dtype": dtype}
    result = new_engine("engine_kernels.py", options).run().result
    assert result["cached"]["warmed"] == result["cached"]["first again"] > 0
    assert result["texts"]["warmed"] == result["texts"]["first again"]
    assert result["texts"]["spoiled"] != result["texts"]["first again"], "the cache is what is read"
    assert result["changed_bytes"] == 0
    assert result["spliced_equals_recomputed"] < 0.01
