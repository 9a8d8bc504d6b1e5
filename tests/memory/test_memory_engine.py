"""``kvgraph memory`` before a real engine with a model that remembers: what left comes back."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from kvgraph.hooks.recall.cover import SpliceLimits
from kvgraph_bench.recall.approximate import keep_calibration
from kvgraph_bench.recall.recall_language import ASK, FACT, KEYS, NOISE, VALUES
from kvgraph_bench.recall.recall_stage import RECALLS
from kvgraph_bench.serving.listening import free_port
from kvgraph_bench.serving.vllm_server import Server, ServerPlan

pytestmark = pytest.mark.engine
pytest.importorskip("bm25s")
BUDGET = 320  # tokens: the model was taught texts of up to 512
TURNS = 40
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


class Memory:
    """The command, as a process."""

    def __init__(self, engine: str, log: Path, *options: str) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [
            sys.executable, "-m", "kvgraph", "memory", engine, "--budget", str(BUDGET),
            "--port", str(port), "--top", "1", *options,
        ]  # fmt: skip
        with log.open("wb") as file:
            self._process = subprocess.Popen(command, stdout=file, stderr=file)
        deadline = time.monotonic() + 180  # of a start beside whatever else runs
        while time.monotonic() < deadline:
            try:
                httpx.get(f"{self.url}/healthz", trust_env=False)
            except httpx.TransportError:
                time.sleep(0.1)
                continue
            return
        raise AssertionError(f"the memory did not start: {log.read_text()}")

    def chat(self, chat: list[dict[str, str]], session: str) -> dict[str, Any]:
        """What is answered, with what its memory says."""
        body = {"model": "demo", "messages": chat, "max_tokens": 3, "temperature": 0,
                "ignore_eos": True}  # fmt: skip
        answer = httpx.post(
            f"{self.url}/v1/chat/completions", json=body, headers={"X-Session-ID": session},
            timeout=120, trust_env=False,
        )  # fmt: skip
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found | {"memory": json.loads(answer.headers["x-kvgraph-memory"])}

    def stop(self) -> None:
        self._process.send_signal(signal.SIGINT)  # SIGTERM would let probes hear of it first
        self._process.wait(40)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    from vllm.config import ModelConfig

    directory = tmp_path_factory.mktemp("memory")
    limits = SpliceLimits(16, most_generations=4)  # 4: what is calibrated at most
    keep_calibration(ModelConfig(str(RECALLS), max_model_len=512), directory, limits)
    template = directory / "words.jinja"
    template.write_text(TEMPLATE)
    settings = (
        ("AITHER_KVCACHE_CALIBRATIONS", str(directory)), ("AITHER_KVCACHE_WARM_GIB", "0.5"),
        ("OMP_NUM_THREADS", "1"), ("AITHER_KVCACHE_RECALL_ALWAYS", "1"),  # so small a model
        ("AITHER_KVCACHE_RECALL_SHARED", "1"),
    )  # fmt: skip
    plan = ServerPlan(
        str(RECALLS), True, directory, blocks=256, max_model_len=512, settings=settings,
        options=("--chat-template", str(template)),
    )  # fmt: skip
    with Server(plan) as server:
        yield server


def said(tokens: list[int]) -> str:
    return " ".join(f"t{token}" for token in tokens)


class Planted(NamedTuple):
    """What came of a chat: what was told, what was said of it when it was asked for, and the share
    of the prompts' tokens that were spliced, since blocks left.
    """

    values: list[int]
    text: str
    last: Any
    spliced: float


def planted(memory: Memory, rng: random.Random, session: str) -> Planted:
    """A fact, then turns of noise and other facts, then the question."""
    keys = rng.sample(range(*KEYS), TURNS + 1)
    chat: list[dict[str, str]] = []
    values = [rng.randrange(*VALUES) for _ in range(3)]
    since: list[tuple[int, int]] = []
    for turn in range(TURNS):
        fact = values if turn == 1 else [rng.randrange(*VALUES) for _ in range(3)]
        words = [rng.randrange(*NOISE) for _ in range(24)]
        text = said([*words[:12], FACT, keys[turn], *fact, *words[12:]])
        chat.append({"role": "user", "content": text})
        answer = memory.chat(chat, session)
        if answer["memory"]["away"]:
            since.append((recalled(answer)["spliced"], answer["usage"]["prompt_tokens"]))
        chat.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
    last = memory.chat([*chat, {"role": "user", "content": said([ASK, keys[1]])}], session)
    spliced, prompt = map(sum, zip(*since, strict=True))
    return Planted(values, last["choices"][0]["message"]["content"], last, spliced / prompt)


def in_prompt(memory: Memory, session: str, name: str) -> bool:
    """Whether a block is in a chat's prompt."""
    (chat,) = httpx.get(f"{memory.url}/memory/{session}", trust_env=False).json()
    return any(each["name"] == name and each["place"] is not None for each in chat["blocks"])


def recalled(answer: Any) -> dict[str, int]:
    found: dict[str, int] = answer["kv_transfer_params"]["kvgraph"]["recall"]
    return found


def test_a_fact_comes_back_after_dozens_of_evictions(engine: Server, tmp_path: Path) -> None:
    """No single turn need splice anything: where a message of 29 tokens is cut by the end of what
    the session's pool still has, the rest of it is too short to be found, and all behind it is
    computed. But whenever blocks leave, the others move: over a chat, much is spliced (.4 and more
    was seen, on idle cores and on busy ones; .11 where text that was computed behind spliced text
    was not). What is answered on the way depends on what was spliced, and so on the moment. So the
    fact may have come back in an earlier turn and be in the prompt still, and in one chat of five
    an answer in the prompt may say its key, which the gate counts as what was asked for.
    """
    rng = random.Random(3)
    with ExitStack() as stack:
        memory = Memory(engine.url, tmp_path / "memory.log")
        stack.callback(memory.stop)
        outcomes = [planted(memory, rng, f"s{number}") for number in range(5)]
        there = [in_prompt(memory, f"s{number}", "user#1") for number in range(5)]
        status = httpx.get(f"{memory.url}/memory", trust_env=False).json()
    right = [each.text.split() == said(each.values).split() for each in outcomes]
    assert status["evicted"] > 100
    assert status["beyond"] == 0
    for each in outcomes:
        assert each.last["memory"]["recalled"] in ([], ["user#1"])
        assert each.last["usage"]["prompt_tokens"] <= BUDGET
        assert sum(recalled(each.last).values()) == each.last["usage"]["prompt_tokens"]
        assert each.spliced > 0.2, [outcome.spliced for outcome in outcomes]
    assert sum(there) >= 4, outcomes
    assert sum(right) >= 3, outcomes
