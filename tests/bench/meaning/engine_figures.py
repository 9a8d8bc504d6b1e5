"""The figures of ``kvgraph bench meaning`` that real servers give."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from ..errors import BenchError
from ..figures import Figures
from ..serving.model import ModelShape, ensure_model
from ..serving.vllm_server import Server, ServerPlan
from ..serving.workload import BLOCK
from .families import FAMILIES, write_tokenizer

if TYPE_CHECKING:
    from openai import OpenAI

POOL: Final = 240  # blocks
MOST_TOKENS: Final = 7168  # of a prompt and its answer: 200 turns, in less than the pool

Message = dict[str, Any]


class Reply(NamedTuple):
    text: str
    cached: int  # tokens of its prompt that the engine had
    first_s: float  # seconds until something of it came


def chat_plan(model: Path, graph: bool, directory: Path, name: str) -> ServerPlan:
    """What to start; its sidecar's notes lie in ``runtime_of(directory)``."""
    runtime_of(directory).mkdir(mode=0o700, exist_ok=True)
    return ServerPlan(
        str(model), graph, directory, blocks=POOL, max_model_len=MOST_TOKENS, max_num_seqs=4,
        name=name, settings=(("XDG_RUNTIME_DIR", str(runtime_of(directory))),),
    )  # fmt: skip


def runtime_of(directory: Path) -> Path:
    """Where the sidecars of these servers say where they are, and nobody else's."""
    return directory / "run"


def client_of(server: Server) -> OpenAI:
    from openai import OpenAI

    return OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300)


def ask(client: OpenAI, messages: list[Message], tokens: int) -> Reply:
    began, first_s, text, cached = time.perf_counter(), 0.0, "", 0
    create: Any = client.chat.completions.create
    stream = create(
        model="demo", messages=messages, max_tokens=tokens, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    for chunk in stream:
        first_s = first_s or time.perf_counter() - began
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        if chunk.usage and chunk.usage.prompt_tokens_details:
            cached = chunk.usage.prompt_tokens_details.cached_tokens or 0
    return Reply(text, cached, first_s)


def said(role: str, text: str) -> Message:
    return {"role": role, "content": text}


QUICK_MODEL: Final = ModelShape(
    hidden=128, layers=2, heads=2, kv_heads=2, intermediate=384, vocab=2112, max_tokens=8192
)  # for what depends on no time
SLOW_MODEL: Final = ModelShape(vocab=2112, max_tokens=8192)
"""Computes a long prompt for much longer than a server needs for the rest of a request."""
_SPACE: Final = "Ġ"  # how byte pairs write the space before a word


def write_chat_model(directory: Path, shape: ModelShape) -> Path:
    """A random Llama with the tokenizer and the chat template of a family; returns its folder."""
    shutil.copytree(ensure_model(shape), directory)
    hermes = next(family for family in FAMILIES if family.name == "hermes")
    end = write_tokenizer(hermes, directory)
    for name in ("config.json", "generation_config.json"):
        path = directory / name
        path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": end}))
    return directory


class Words:
    def __init__(self, model: Path, seed: int) -> None:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        words = sorted(each[1:] for each in tokenizer.get_vocab() if each[0] == _SPACE)
        self._words = [
            each for each in words if each.isalpha() and len(tokenizer.encode(f" {each}").ids) == 1
        ]
        self._rng = random.Random(seed)

    def text(self, tokens: int) -> str:
        """About so many tokens: the first word, without a space before it, may be several."""
        return " ".join(self._rng.choices(self._words, k=tokens))


_PREFIX: Final = 48  # blocks: a fifth of the pool
_COMMAND: Final = "from kvgraph.advisor.cli import main; main()"


def first_turns(
    server: Server, client: OpenAI, words: Words, directory: Path, count: int
) -> list[float]:
    """Seconds to the first token behind ``kvgraph precache`` and prompts that fill the pool."""
    system = words.text(_PREFIX * BLOCK)
    file = directory / "precache.toml"
    file.write_text(f'[server]\nurl = "{server.url}/v1"\n[[prefix]]\nsystem = "file:system.md"\n')
    (directory / "system.md").write_text(system)
    found = []
    for _ in range(count):
        _precache(file, directory)
        burst(client, words)
        turn = [said("system", system), said("user", words.text(8))]
        found.append(ask(client, turn, 2).first_s)
    return found


def _precache(file: Path, directory: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _COMMAND, "precache", str(file)], text=True, capture_output=True,
        env={**os.environ, "XDG_RUNTIME_DIR": str(runtime_of(directory))}, timeout=300, check=False,
    )  # fmt: skip
    if done.returncode:
        raise BenchError(f"kvgraph precache ended with {done.returncode}: {done.stdout[-500:]}")


_SYSTEM: Final = 8  # blocks of the system text
_OTHERS: Final = 60  # blocks of a prompt of another client
_SAID: Final = 8  # tokens that a turn brings, beside its answer
_ANSWER: Final = 4
_BURST_EVERY: Final = 10  # turns
_BURST: Final = -(-3 * POOL // (2 * _OTHERS))  # prompts: half as much again as the pool holds


class Survival(NamedTuple):
    turns: float  # share of turns, of all but the first, that found the whole system text
    bursts: float  # the same of the turns behind others' prompts


def survival(client: OpenAI, words: Words, turns: int) -> Survival:
    """Talk for so many turns; as the history grows, it never nears the end of the context."""
    messages = [said("system", words.text(_SYSTEM * BLOCK))]
    kept: list[bool] = []
    for turn in range(turns):
        if turn and turn % _BURST_EVERY == 0:
            burst(client, words)
        messages.append(said("user", words.text(_SAID)))
        reply = ask(client, messages, _ANSWER)
        messages.append(said("assistant", reply.text or "."))
        kept.append(reply.cached >= _SYSTEM * BLOCK)
    behind = kept[_BURST_EVERY::_BURST_EVERY]
    return Survival(sum(kept[1:]) / (turns - 1), sum(behind) / len(behind))


def burst(client: OpenAI, words: Words) -> None:
    for _ in range(_BURST):
        ask(client, [said("user", words.text(_OTHERS * BLOCK - 16))], 1)


Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Scale:
    turns: int  # of the long chat
    firsts: int  # first turns behind ``kvgraph precache``


FULL: Final = Scale(turns=200, firsts=7)
QUICK: Final = Scale(turns=30, firsts=2)


def add_engine_figures(figures: Figures, scale: Scale, seed: int, say: Say) -> None:
    """Measure on stock vLLM, and on the graph as it comes with layers."""
    with tempfile.TemporaryDirectory(prefix="kvg-", dir="/tmp") as scratch:
        bench = _Bench(Path(scratch), figures, scale, seed, say)
        bench.long_chat("stock", graph=False)
        bench.long_chat("graph", graph=True)
        stock = bench.first_turns("stock_first", graph=False)
        graph = bench.first_turns("graph_first", graph=True)
    figures.add("precache_ttft_ratio", graph / stock, "of stock's", "≤ 0.3")


class _Bench:
    def __init__(
        self, directory: Path, figures: Figures, scale: Scale, seed: int, say: Say
    ) -> None:
        self._directory, self._figures, self._scale = directory, figures, scale
        self._seed, self._say = seed, say
        self._model = write_chat_model(directory / "model", QUICK_MODEL)

    def long_chat(self, name: str, graph: bool) -> None:
        prefix = "" if graph else "stock_"
        with self._server(chat_plan(self._model, graph, self._directory, name)) as server:
            self._add_survival(f"{prefix}identity_survival", self._words(), server)

    def first_turns(self, name: str, graph: bool) -> float:
        """First turns of a model that computes their prefix for long: their seconds, the median."""
        model = self._directory / "slow"
        if not model.is_dir():
            write_chat_model(model, SLOW_MODEL)
        with self._server(chat_plan(model, graph, self._directory, name)) as server:
            client = client_of(server)
            found = first_turns(server, client, self._words(), self._directory, self._scale.firsts)
        self._say(f"{name}: first turns {[round(each, 3) for each in found]} s")
        figure = "first_turn" if graph else "stock_first_turn"
        self._figures.add(figure, [1000 * each for each in found], "ms", "")
        return float(np.median(found))

    def _add_survival(self, name: str, words: Words, server: Server) -> None:
        found = survival(client_of(server), words, self._scale.turns)
        self._say(f"{name}: {found}")
        target = "< 1" if name.startswith("stock") else "1"
        self._figures.add(name, found.turns, "of turns", target)
        self._figures.add(f"{name}_behind_others", found.bursts, "of turns", target)

    def _words(self) -> Words:
        return Words(self._model, self._seed)

    @contextlib.contextmanager
    def _server(self, plan: ServerPlan) -> Iterator[Server]:
        self._say(f"{plan.arm}: starting vLLM")
        with Server(plan) as server:
            yield server
