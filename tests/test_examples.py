"""The examples run as a person runs them, end by themselves, and use the public face alone."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from page_sidecar import TOKEN, PageSidecar

EXAMPLES = Path(__file__).parent.parent / "examples"
FEWER_LINES_THAN = 60


def run(name: str, *args: str, warned_of: str = "") -> list[str]:
    """The lines that an example prints; it warns of nothing else."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *args], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert all(warned_of and warned_of in line for line in done.stderr.splitlines()), done.stderr
    return done.stdout.splitlines()


def imported(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.py")), ids=lambda file: file.stem)
def test_an_example_is_short_and_uses_what_is_public(file: Path) -> None:
    assert len(file.read_text().splitlines()) < FEWER_LINES_THAN
    assert "kvgraph" in set(imported(file))
    assert not [name for name in imported(file) if name.startswith("kvgraph.")]
    assert f"python examples/{file.name}" in (ast.get_docstring(ast.parse(file.read_text())) or "")


def test_an_example_asks_for_what_it_needs() -> None:
    name = EXAMPLES / "langgraph_agent.py"
    done = subprocess.run([sys.executable, name], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "langgraph_agent.py ENDPOINT URL" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_graph_is_ranked_without_an_engine() -> None:
    _, *lines = run("rank_a_graph.py")
    assert [" ".join(line.split()[:2]) for line in lines] == [
        "bye 2", "bye 1", "chat 2", "chat 1", "agent 2", "agent 1", "rules 2", "rules 1"
    ]  # fmt: skip
    assert all(line.endswith("session_over") for line in lines[:2])
    assert all(line.endswith("protected_layer") for line in lines[-2:])


def test_kv_events_of_the_stand_in_are_watched() -> None:
    *batches, first = run("watch_kv_events.py")
    assert [int(re.findall(r"holds (\d+)", line)[0]) for line in batches] == [5, 7, 6, 7]
    order = first.removeprefix("first to go: ").split()
    assert set(order) == {"23", "22", "12", "11"}, "what both prompts begin with stays"
    assert order.index("23") < order.index("22"), "a chain loses its tail first"


@pytest.mark.engine
def test_kv_events_of_vllms_own_publisher_are_watched(tmp_path: Path) -> None:
    kv_events = pytest.importorskip("vllm.distributed.kv_events")
    endpoint = f"ipc://{tmp_path}/pub"
    publisher = kv_events.ZmqEventPublisher(0, endpoint)
    over = threading.Event()

    def publish() -> None:
        """A batch ten times a second, each of one block more."""
        for key in range(1, 1000):
            event = kv_events.BlockStored([key], key - 1 or None, [0] * 16, 16, None, "GPU", None)
            publisher.publish(kv_events.KVEventBatch(ts=time.time(), events=[event]))
            if over.wait(0.1):
                return

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        *batches, first = run("watch_kv_events.py", endpoint, warned_of="its picture is partial")
    finally:
        over.set()
        thread.join()
        publisher.shutdown()
    held = [int(re.findall(r"holds (\d+)", line)[0]) for line in batches]
    assert held == sorted(held)
    assert held[-1] > 5
    victims = [int(key) for key in first.removeprefix("first to go: ").split()]
    assert victims == sorted(victims, reverse=True), "one chain, tail first"


def test_an_agent_of_langgraph_says_what_it_waits_for(page_sidecar: PageSidecar) -> None:
    assert run("langgraph_agent.py", page_sidecar.endpoint, page_sidecar.url) == ["Found."]
    request = urllib.request.Request(f"{page_sidecar.url}/sessions/chat-7/explain")
    request.add_header("Authorization", f"Bearer {TOKEN}")
    with urllib.request.urlopen(request) as answer:
        found = json.load(answer)
    assert (found["turns"], found["last_stop"]) == (2, "end_of_turn")


def test_a_policy_is_written_and_replayed() -> None:
    rates = {name: float(rate) for name, rate in rates_of(run("replay_a_policy.py"))}
    assert list(rates) == ["lru", "patient", "default", "belady"]
    assert rates["lru"] < rates["patient"] <= rates["belady"]


def test_a_policy_is_replayed_on_a_trace_of_ones_own(tmp_path: Path) -> None:
    lines = [{"timestamp": at, "input_length": 1024, "hash_ids": [1, 2]} for at in range(4)]
    trace = tmp_path / "mine.jsonl"
    trace.write_text("\n".join(json.dumps(line) for line in lines))
    found = run("replay_a_policy.py", str(trace), "8")
    assert len(found) == 4
    assert all(line.endswith("of 8 blocks") for line in found)
    assert len({rate for _, rate in rates_of(found)}) == 1, "all of it fits: no policy matters"


def rates_of(lines: list[str]) -> list[tuple[str, str]]:
    """``(policy, per cent)``."""
    return [(line.split()[0], re.findall(r"([\d.]+)%", line)[0]) for line in lines]
