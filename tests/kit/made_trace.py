"""Traces made by hand, and of chats: without a file."""

from __future__ import annotations

import random

import numpy as np
from kvgraph.advisor.replay.reader import infer_sessions
from kvgraph.advisor.replay.trace import Trace, last_turns

SEED = 20_261_121


def make_trace(chains: list[list[int]], at: list[float] | None = None, output: int = 10) -> Trace:
    lengths = np.array([len(chain) for chain in chains], dtype=np.int32)
    num_blocks = max(map(max, chains)) + 1
    session = infer_sessions(chains, lengths.tolist(), num_blocks)
    return Trace(
        name="made",
        block_size=16,
        at=np.array(at if at else range(len(chains)), dtype=np.float64),
        input_tokens=lengths * 16,
        output_tokens=np.full(len(chains), output, dtype=np.int32),
        starts=np.append(0, np.cumsum(lengths)).astype(np.int64),
        blocks=np.array([b for chain in chains for b in chain], dtype=np.int32),
        prompts=lengths,
        full=lengths,
        matchable=lengths,
        session=session,
        last=last_turns(session),
        has_sessions=False,
    )


def chat_trace(requests: int = 600, seed: int = SEED) -> Trace:
    """Sessions that share a system prompt, come back or not, and sometimes edit their history."""
    rng = random.Random(seed)
    fresh = iter(range(1_000_000))
    system = [next(fresh) for _ in range(2)]
    sessions: list[list[int]] = []
    chains = []
    for _ in range(requests):
        if sessions and rng.random() < 0.5:
            chain = rng.choice(sessions[-40:])
            if rng.random() < 0.1:
                del chain[rng.randrange(2, len(chain)) :]
        else:
            chain = list(system)
            sessions.append(chain)
        chain += [next(fresh) for _ in range(rng.randrange(1, 6))]
        chains.append(list(chain))
    ids = {block: i for i, block in enumerate(dict.fromkeys(b for c in chains for b in c))}
    return make_trace([[ids[b] for b in chain] for chain in chains])
