"""``kvgraph memory`` before a real engine with a model that remembers: what left comes back."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from kvgraph.advisor.memory.settings import Mode
from kvgraph_bench.memory.chat_experiments import PLANTED_BUDGET, arm, planted
from kvgraph_bench.memory.memory_stage import remembering_engine

pytestmark = pytest.mark.engine
pytest.importorskip("bm25s")
CHATS = 5


def test_a_fact_comes_back_after_dozens_of_evictions(tmp_path: Path) -> None:
    """No single turn need splice anything: where a message of 29 tokens is cut by the end of what
    the session's pool still has, the rest of it is too short to be found, and all behind it is
    computed. But whenever blocks leave, the others move: over a chat, much is spliced (.4 and more
    was seen, on idle cores and on busy ones; .11 where text that was computed behind spliced text
    was not). What is answered on the way depends on what was spliced, and so on the moment; in one
    chat of five an answer in the prompt may say its key, which the gate counts as what was asked
    for.
    """
    with remembering_engine(tmp_path) as server:
        ways = [arm(Mode.KV_RESTORE, PLANTED_BUDGET)]
        (found,) = asyncio.run(planted(server.url, ways, CHATS, seed=3))
    assert found.evicted > 24 * CHATS
    assert found.seen.peak <= PLANTED_BUDGET + 3, "the budget, and an answer"
    assert found.recalled >= CHATS - 1, found
    assert found.seen.spliced > 0.2 * found.seen.prompt, found
    assert sum(found.right) >= 3, found
