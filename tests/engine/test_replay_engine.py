"""Our LRU against a real vLLM: the same hits, request by request, block for block."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kvgraph.advisor.cli import main
from kvgraph.advisor.replay.arms import Settings, run_arm
from kvgraph.advisor.replay.fast import lru_hits
from kvgraph.advisor.replay.reader import load_trace
from kvgraph.advisor.replay.simulator import Instance, Load, LruOrder, simulate

pytestmark = pytest.mark.engine
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


@pytest.fixture
def real_hits(tiny_model: Path, new_engine: Any) -> Callable[[list[list[int]]], list[int]]:
    """Blocks of each prompt that a stock vLLM's prefix cache held."""

    def hits(prompts: list[list[int]]) -> list[int]:
        options = {"model": str(tiny_model), "blocks": POOL, "prompts": prompts}
        return [tokens // BLOCK for tokens in new_engine("engine_replay.py", options).run().result]

    return hits


def test_our_lru_hits_what_vllm_hits(
    real_hits: Callable[[list[list[int]]], list[int]], tmp_path: Path
) -> None:
    prompts = workload(80)
    trace = load_trace(as_trace(prompts, tmp_path / "small.jsonl"))
    # vLLM keeps one block of its pool for itself, the null block.
    ours = simulate(trace, [Instance(POOL - 1, LruOrder())], load=Load())
    real = real_hits(prompts)
    assert sum(real) > 0
    assert lru_hits(trace, 10_000).sum() > sum(real), "there was no memory pressure"
    assert ours.hits.tolist() == real
    # Another block is never cached: the partial one at the end of whatever runs.
    assert lru_hits(trace, POOL - 2).tolist() == real


RECORDED_POOL = 39  # of the 40 blocks of engine_run.py vLLM keeps one, the null block
REQUESTS = 36


@pytest.fixture
def recorder(socket_directory: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """``kvgraph record``, ready for an engine."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "kvgraph", "record", str(tmp_path / "live.jsonl"),
         "--endpoint", f"ipc://{socket_directory}/s"],
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True,
    )  # fmt: skip
    assert "ready" in process.stdout.readline()
    yield process
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()


def test_what_a_live_engine_did_is_a_trace(
    recorder: subprocess.Popen[str],
    new_engine: Any,
    tiny_model: Path,
    socket_directory: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = new_engine(
        "engine_run.py", {"model": str(tiny_model), "pause_s": 0.1},
        AITHER_KVCACHE_GRAPH="1", AITHER_KVCACHE_SIDECAR=f"ipc://{socket_directory}/s",
    ).run().result  # fmt: skip
    recorder.send_signal(signal.SIGTERM)
    assert recorder.wait(30) == 0
    path = tmp_path / "live.jsonl"
    header, *lines = map(json.loads, path.read_text().splitlines())
    assert header == {"kvgraph_trace": 1, "block_size": 32}
    assert len(lines) == REQUESTS
    assert sum(line["cached_tokens"] for line in lines) == result["cached"]
    assert sum(line["ended"] for line in lines) == REQUESTS - 12  # but those that return
    trace = load_trace(path)
    assert trace.turns().max() == 5
    # The engine had the classic score's advice; the lab, with the same, finds what it found.
    lru, classic, bound = (
        int(run_arm(arm, trace, RECORDED_POOL, Settings()).sum())
        for arm in ("lru", "classic+hints", "infinite")
    )
    assert lru < result["cached"] // 32 <= bound
    assert lru < classic <= bound
    with pytest.raises(SystemExit) as ended:
        main(["replay", str(path), "--analyze", "--capacity", str(RECORDED_POOL), "--json"])
    assert ended.value.code == 0
    losses = json.loads(capsys.readouterr().out)["losses"][str(RECORDED_POOL)]
    assert losses["multi_turn_share"] == 1.0
