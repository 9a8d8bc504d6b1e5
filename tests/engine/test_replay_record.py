"""``kvgraph record`` beside a real vLLM: yesterday's traffic becomes tomorrow's trace."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kvgraph.advisor.cli import main
from kvgraph.advisor.replay.arms import Settings, run_arm
from kvgraph.advisor.replay.reader import load_trace

pytestmark = pytest.mark.engine
POOL = 39  # of the 40 blocks of engine_run.py vLLM keeps one, the null block
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
    assert process.stdout is not None
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
        int(run_arm(arm, trace, POOL, Settings()).sum())
        for arm in ("lru", "classic+hints", "infinite")
    )
    assert lru < result["cached"] // 32 <= bound
    assert lru < classic <= bound
    with pytest.raises(SystemExit) as ended:
        main(["replay", str(path), "--analyze", "--capacity", str(POOL), "--json"])
    assert ended.value.code == 0
    losses = json.loads(capsys.readouterr().out)["losses"][str(POOL)]
    assert losses["multi_turn_share"] == 1.0
