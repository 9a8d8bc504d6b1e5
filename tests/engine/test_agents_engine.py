"""A real vLLM engine gives recorded answers, and the next prompt finds them in its cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine

END = 2
PROMPTS = [list(range(10, 70)), list(range(100, 180)), list(range(200, 240))]


def test_answers_are_forced_to_their_end_and_stand_in_the_cache(
    tiny_model: Path, new_engine: Any
) -> None:
    answers = [[*range(300, 340), END], [7, END], None]  # three requests, batches of two
    options = {"model": str(tiny_model), "prompts": PROMPTS, "answers": answers, "end": END}
    result = new_engine("engine_agents.py", options).run().result
    said = result["first"]
    for got, answer in zip(said[:2], answers[:2], strict=True):
        assert got["tokens"] == answer
        assert got["finish"] == "stop"
    assert len(said[2]["tokens"]) > 2, "a request without an answer is the model's own"
    # 60 + 41 tokens, of which the last was never computed: three blocks of 32.
    assert result["second"][0]["cached"] == 96
    assert [each["tokens"] for each in result["second"]] == [[11, END]] * 3
    assert "must be a list of token ids" in result["refused"]
