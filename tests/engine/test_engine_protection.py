"""A real vLLM engine on busy cores loses no protected block while another is free."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine


def test_no_protected_block_is_lost_on_a_busy_machine(new_engine: Any, tiny_model: Path) -> None:
    options = {"model": str(tiny_model), "rounds": 20, "busy": 2}
    settings = {"AITHER_KVCACHE_GRAPH": "1", "KVGRAPH_SCORE__PROTECTED_SHARE": "0.5"}
    engine = new_engine("engine_protected.py", options, **settings)
    result = engine.run(timeout_s=600.0).result
    assert result["protected"] > 0
    assert result["taken"] > 5 * 80, "too little was asked of the pool"
    assert result["needless"] == 0, result
