"""Our LRU against a real vLLM: the same hits, request by request, block for block."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from kvgraph.advisor.replay.instance import Instance
from kvgraph.advisor.replay.lru import lru_hits
from kvgraph.advisor.replay.orders import LruOrder
from kvgraph.advisor.replay.reader import load_trace
from kvgraph.advisor.replay.simulator import Load, simulate

pytestmark = pytest.mark.engine
SCRIPT = Path(__file__).parent / "engine_replay.py"
BLOCK, ANSWER, PARTIAL = 32, 4, 5
POOL = 30
SEED = 11


def workload(requests: int) -> list[list[int]]:
    """Prompts as token ids: chats over a shared system prompt, that return, branch or do not."""
    rng = random.Random(SEED)

    def text(blocks: int) -> list[int]:
        return [rng.randrange(10, 500) for _ in range(blocks * BLOCK)]

    system, chats, prompts = text(2), [], []
    for _ in range(requests):
        chat = list(rng.choice(chats[-25:])) if chats and rng.random() < 0.6 else list(system)
        if rng.random() < 0.15:
            chat = chat[: max(len(system), len(chat) - 2 * BLOCK)]  # its history was edited
        if len(chat) > 9 * BLOCK:
            chat = list(system)
        chat += text(rng.randrange(1, 5))
        chats.append(chat)
        prompts.append([*chat, *[7] * PARTIAL])
    return prompts


def as_trace(prompts: list[list[int]], path: Path) -> Path:
    ids: dict[tuple[int, ...], int] = {}
    lines = [json.dumps({"kvgraph_trace": 1, "block_size": BLOCK})]
    for number, prompt in enumerate(prompts):
        ends = range(BLOCK, len(prompt) + 1, BLOCK)
        chain = [ids.setdefault(tuple(prompt[:end]), len(ids)) for end in ends]
        line = {"at": 100.0 * number, "input_length": len(prompt), "output_length": ANSWER}
        lines.append(json.dumps(line | {"hash_ids": chain}))
    path.write_text("\n".join(lines) + "\n")
    return path


def real_hits(model: Path, prompts: list[list[int]]) -> list[int]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("AITHER_")}
    options = {"model": str(model), "blocks": POOL, "prompts": prompts}
    process = subprocess.Popen(
        [sys.executable, "-P", str(SCRIPT), json.dumps(options)],
        env={**inherited, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=300)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    found = re.search(r"^RESULT (.*)$", output, re.MULTILINE)
    assert found, output[-4000:]
    return [tokens // BLOCK for tokens in json.loads(found[1])]


def test_our_lru_hits_what_vllm_hits(tiny_model: Path, tmp_path: Path) -> None:
    prompts = workload(80)
    trace = load_trace(as_trace(prompts, tmp_path / "small.jsonl"))
    # vLLM keeps one block of its pool for itself, the null block.
    ours = simulate(trace, [Instance(POOL - 1, LruOrder())], load=Load())
    real = real_hits(tiny_model, prompts)
    assert sum(real) > 0
    assert lru_hits(trace, 10_000).sum() > sum(real), "there was no memory pressure"
    assert ours.hits.tolist() == real
    # Another block is never cached: the partial one at the end of whatever runs.
    assert lru_hits(trace, POOL - 2).tolist() == real
