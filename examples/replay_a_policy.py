"""Write a policy and replay it: what share of all prompts would an engine find in its cache?

python examples/replay_a_policy.py [TRACE [BLOCKS]]    # such as `kvgraph record` writes

Without TRACE it makes one up: twenty assistants, each with a long prompt of its own, and
documents that are asked about once.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
from kvgraph import Selection, View, hit_rate, load_trace

Scores = npt.NDArray[np.float64]


class Patient:
    """A block that was found n times may lie idle n + 1 times as long as one that never was."""

    name = "patient"

    def observe(self, view: View) -> None:
        """Nothing to learn: the graph counts."""

    def scores(self, view: View, picked: Selection) -> Scores:
        found = picked.of(view.blocks.hit_count).astype(np.float64)
        return (view.now - picked.last_used()) / (1.0 + found)  # the highest goes first

    def terms(self, view: View, picked: Selection) -> dict[str, Scores]:
        return {"idle per find": self.scores(view, picked)}  # for people: parts that add up to it


def made_up(path: Path) -> Path:
    """Write a trace in Mooncake's format: a request a line, with ids of its blocks."""
    dice, lines = random.Random(1), []
    for number in range(1000):
        assistant, document = 100 * dice.randrange(20), 10_000 + 100 * number
        blocks = [*range(assistant, assistant + 8), *range(document, document + 12)]
        request = {"input_length": 512 * len(blocks), "output_length": 100, "hash_ids": blocks}
        lines.append(json.dumps({"timestamp": 500 * number, **request}))
    path.write_text("\n".join(lines))
    return path


with tempfile.TemporaryDirectory() as folder:
    given = Path(sys.argv[1]) if len(sys.argv) > 1 else made_up(Path(folder, "made_up.jsonl"))
    trace = load_trace(given)
capacity = int(sys.argv[2]) if len(sys.argv) > 2 else 250
for policy in ("lru", Patient(), "default", "belady"):
    name = policy if isinstance(policy, str) else policy.name
    print(f"{name:8} {hit_rate(trace, capacity, policy):.1%} of {trace.prompt_blocks:,} blocks")
