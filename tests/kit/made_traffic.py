"""Generated traffic of several kinds, as traces: what policies were not built on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from kvgraph.advisor.replay.reader import load_trace
from kvgraph.advisor.replay.trace import Trace

Request = tuple[float, int, int, int]  # seconds, session, blocks, answer tokens
Maker = Callable[[np.random.Generator], Iterator[Request]]


class Sessions:
    """Chains that grow turn by turn behind one shared block."""

    def __init__(self) -> None:
        self._chains: dict[int, list[int]] = {}
        self._blocks = 0

    def line(self, request: Request) -> dict[str, object]:
        at, session, blocks, answer = request
        chain = self._chains.setdefault(session, [0])
        while len(chain) < blocks:
            self._blocks += 1
            chain.append(self._blocks)
        tokens = 512 * blocks
        return {
            "timestamp": 1000 * at,
            "input_length": tokens,
            "output_length": answer,
            "hash_ids": chain[:blocks],
        }


def chats(rng: np.random.Generator, pace: float = 1.0) -> Iterator[Request]:
    """Half never return; the longer a session, the likelier it goes on."""
    for session in range(400):
        at, turns = session * 1.2 * pace, 1 + int(rng.geometric(0.5)) * int(rng.random() < 0.5)
        blocks = int(rng.integers(4, 30))
        for _ in range(turns):
            yield at, session, blocks, int(rng.integers(10, 600))
            at += float(rng.lognormal(4.0, 0.8)) * pace
            blocks += int(rng.integers(1, 4))


def agents(rng: np.random.Generator) -> Iterator[Request]:
    """Tool loops: many quick turns, then never again; one-shot questions in between."""
    for session in range(100):
        at, blocks = session * 3.0, int(rng.integers(3, 12))
        for _ in range(int(rng.integers(4, 16)) if session % 3 else 1):
            yield at, session, blocks, 60
            at += float(rng.uniform(2.0, 12.0))
            blocks += int(rng.integers(1, 5))


def turned(rng: np.random.Generator) -> Iterator[Request]:
    """Long prompts return and short ones do not; from the middle on it is the other way round."""
    for session in range(400):
        at, long = session * 1.5, bool(rng.random() < 0.5)
        blocks = 24 if long else 8
        for _ in range(3 if long == (session < 200) else 1):
            yield at, session, blocks, 100
            at += float(rng.uniform(10.0, 40.0))
            blocks += 1


def recent(rng: np.random.Generator) -> Iterator[Request]:
    """Whoever asked last is the likeliest to ask next, whatever else is known of it."""
    stack: list[int] = []
    length: dict[int, int] = {}
    for number in range(2000):
        back = int(rng.geometric(0.06)) - 1
        session = stack.pop(-1 - back) if back < len(stack) else len(length)
        length[session] = length.get(session, int(rng.integers(4, 20))) + 1
        if length[session] < 60:
            stack.append(session)
        yield number * 0.6, session, length[session], 50


def made(tmp_path: Path, requests: Iterator[Request]) -> Trace:
    sessions = Sessions()
    lines = [sessions.line(each) for each in sorted(requests)]
    path = tmp_path / "made.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return load_trace(path)
