"""The benches of recall that need no engine: chats with answers, and made-up compactions."""

from __future__ import annotations

import json
import random
import subprocess
import sys

from kvgraph.bench.memory.told_chats import said, tell
from kvgraph.bench.recall.compactions import play_compactions
from kvgraph.bench.recorded.agents_fleet import SESSIONS


def test_what_a_chat_is_asked_for_was_told_in_it() -> None:
    told = tell(80, random.Random(1))
    for at in range(32):  # of keys that are told once
        fact = said([1, told.keys[at], *told.values[at]])
        assert fact in told.messages[at]
        assert sum(f"t1 t{told.keys[at]} " in text for text in told.messages) == 1
        assert told.question(at) == said([2, told.keys[at]])
        assert told.answer(at) == said(told.values[at]).split()


def test_spans_recover_a_part_of_what_compactions_lose() -> None:
    done = play_compactions(SESSIONS, 1000, 1, sessions=6)
    assert 0 < done.recovered < done.lost
    assert done.lost + done.exact <= done.prompt
    assert done.compactions > 0


def test_what_a_session_said_behind_spliced_text_is_recovered_too() -> None:
    first = play_compactions(SESSIONS, 1000, 1, sessions=6, generations=1)
    assert first.recovered < play_compactions(SESSIONS, 1000, 1, sessions=6).recovered


def test_figures_alone_are_on_stdout_whatever_vllm_logs() -> None:
    command = [sys.executable, "-m", "kvgraph", "bench", "recall", "--part", "mixed", "--quick"]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    figures = json.loads(done.stdout)["figures"]
    assert figures["cross_hits"]["value"] == 0
    assert "INFO" in done.stderr
