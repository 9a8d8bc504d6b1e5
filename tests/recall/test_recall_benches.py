"""The benches of recall that need no engine: chats with answers, and made-up compactions."""

from __future__ import annotations

import json
import subprocess
import sys

from kvgraph_bench.recall.compactions import play_compactions
from kvgraph_bench.recorded.agents_fleet import SESSIONS


def test_spans_recover_a_part_of_what_compactions_lose() -> None:
    done = play_compactions(SESSIONS, 1000, 1, sessions=6)
    assert 0 < done.recovered < done.lost
    assert done.lost + done.exact <= done.prompt
    assert done.compactions > 0


def test_figures_alone_are_on_stdout_whatever_vllm_logs() -> None:
    command = [sys.executable, "-m", "kvgraph", "bench", "recall", "--part", "mixed", "--quick"]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    figures = json.loads(done.stdout)["figures"]
    assert figures["cross_hits"]["value"] == 0
    assert "INFO" in done.stderr
