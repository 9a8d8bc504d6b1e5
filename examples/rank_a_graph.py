"""Rank a graph without an engine: report what an engine would report, and ask what goes first.

python examples/rank_a_graph.py
"""

from __future__ import annotations

import struct

from kvgraph import (
    BlocksStored,
    EngineHello,
    KVCacheGraph,
    RequestFinished,
    RequestStarted,
    Segment,
    SourceLayer,
)

SIZE = 16  # tokens per block
RULES = Segment(SourceLayer.RULES, 0, 2 * SIZE)  # a caller says: two blocks of rules
# A block's key is its place in this list; vLLM's is a hash of all tokens to the block's end.
NAMES = ["", "rules 1", "rules 2", "agent 1", "agent 2", "chat 1", "chat 2", "bye 1", "bye 2"]

now = 0.0  # the graph's clock, in seconds
graph = KVCacheGraph(clock=lambda: now)


def packed(keys: list[int]) -> bytes:
    return struct.pack(f"<{len(keys)}Q", *keys)


def serve(session: str, keys: list[int], found: int, waits: bool | None, ends: bool) -> None:
    """Report one request, whose first ``found`` blocks were in the engine's cache."""
    chain, tokens = packed(keys), SIZE * len(keys)
    started = RequestStarted(session, chain, tokens, found * SIZE, SIZE, session, segments=(RULES,))
    stored = BlocksStored(packed(keys[found:]), keys[found - 1] if found else None, SIZE)
    finished = RequestFinished(
        session, chain, tokens, tokens, "stop", session, None, waits, None, ends
    )
    graph.apply("engine", [started, stored, finished])


graph.apply("engine", [EngineHello("engine", "model", SIZE, num_blocks=64, version="")])
serve("agent", [1, 2, 3, 4], 0, waits=True, ends=False)  # its answer was a tool call
now = 60.0
serve("chat", [1, 2, 5, 6], 2, waits=None, ends=False)
now = 90.0
serve("bye", [1, 2, 7, 8], 2, waits=None, ends=True)  # its user said goodbye
now = 100.0

print("first to go; the least recently used would be the agent's")
for key in graph.suggest_eviction(8):
    known = graph.explain(key)
    print(f"{NAMES[key]:8} unused for {known['age_s']:3.0f} s  {', '.join(known['standing'])}")
