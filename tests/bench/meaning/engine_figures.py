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

import httpx
import numpy as np
from kvgraph.graph.types import SourceLayer

from ..agents.agents_arms import busy_cores, watched
from ..errors import BenchError
from ..figures import Figures
from ..serving.cache_ledger import Digest, Ledger, chain_digest
from ..serving.model import ModelShape, ensure_model
from ..serving.vllm_server import Server, ServerPlan
from ..serving.workload import BLOCK
from .families import FAMILIES, write_tokenizer

if TYPE_CHECKING:
    from openai import OpenAI

POOL: Final = 240  # blocks
MOST_TOKENS: Final = 7168  # of a prompt and its answer: 200 turns, in less than the pool
RULING: Final = ("KVGRAPH_POLICY__GUARD", "false")
"""Lets the policy rank from the start: a short run is over before it has proved itself."""

Message = dict[str, Any]


class Reply(NamedTuple):
    text: str
    cached: int  # tokens of its prompt that the engine had
    first_s: float  # seconds until something of it came


def chat_plan(
    model: Path, graph: bool, directory: Path, name: str, *settings: tuple[str, str]
) -> ServerPlan:
    """What to start; its sidecar's notes lie in ``runtime_of(directory)``."""
    runtime_of(directory).mkdir(mode=0o700, exist_ok=True)
    return ServerPlan(
        str(model), graph, directory, blocks=POOL, max_model_len=MOST_TOKENS, max_num_seqs=4,
        name=name, settings=(("XDG_RUNTIME_DIR", str(runtime_of(directory))),
                             *settings),
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


_CHATS: Final = 3  # this, and the next two, are chosen
_TURNS: Final = 8
_SYSTEM_BLOCKS, _SAID_BLOCKS, _SUMMARY, _OTHER_BLOCKS = 6, 3, 4, 10  # blocks
_SETTLE_S: Final = 2.0  # until a sidecar has ranked what has just ended

# The ledger tells blocks apart by their layers: chats' blocks get two that are not used here.
_DEAD: Final = SourceLayer.AFFECT
_LIVE: Final = SourceLayer.MEMORIES


@dataclass(slots=True)
class Left:
    dead: int = 0
    live: int = 0

    @property
    def dead_first(self) -> float:
        return self.dead / max(1, self.dead + self.live)


def dead_branches(
    server: Server, client: OpenAI, ledger: Ledger, words: Words, rounds: int
) -> Left:
    """Of the blocks of chats that go first, as many as are dead, how many are dead."""
    found = Left()
    for _ in range(rounds):
        _round(_Chats(server, client, words), ledger, found)
    return found


class _Chats:
    def __init__(self, server: Server, client: OpenAI, words: Words) -> None:
        self._url, self._client, self._words = server.url, client, words
        self.known: dict[Digest, SourceLayer] = {}

    def play(self) -> None:
        """Let them grow, and compact the last one."""
        for _ in range(_CHATS):
            messages = [said("system", self._words.text(_SYSTEM_BLOCKS * BLOCK))]
            for _ in range(_TURNS):
                messages.append(said("user", self._words.text(_SAID_BLOCKS * BLOCK)))
                messages.append(said("assistant", ask(self._client, messages, 4).text or "."))
            self.known.update(dict.fromkeys(self._blocks(messages), _LIVE))
        whole = set(self._blocks(messages))
        compacted = [messages[0], said("user", self._words.text(_SUMMARY * BLOCK))]
        ask(self._client, compacted, 4)
        still = set(self._blocks(compacted))
        self.known.update(dict.fromkeys(whole - still, _DEAD))
        self.known.update(dict.fromkeys(still, _LIVE))

    def press(self) -> None:
        ask(self._client, [said("user", self._words.text(_OTHER_BLOCKS * BLOCK))], 1)

    def _blocks(self, messages: list[Message]) -> Iterator[Digest]:
        """The full blocks of a prompt of these messages, as the engine cuts it."""
        body = {"model": "demo", "messages": messages, "add_generation_prompt": False}
        answer = httpx.post(f"{self._url}/tokenize", json=body, timeout=60.0, trust_env=False)
        tokens, digest = answer.raise_for_status().json()["tokens"], Digest()
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            digest = chain_digest(digest, tokens[start : start + BLOCK])
            yield digest


def _round(chats: _Chats, ledger: Ledger, found: Left) -> None:
    chats.play()
    ledger.know(chats.known)
    ledger.take()
    time.sleep(_SETTLE_S)
    dead = sum(layer is _DEAD for layer in chats.known.values())
    left = Left()
    for _ in range(2 * POOL // _OTHER_BLOCKS):
        chats.press()
        evicted = ledger.take().evicted
        left.dead, left.live = left.dead + evicted[_DEAD], left.live + evicted[_LIVE]
        if left.dead + left.live >= dead:
            break
    found.dead, found.live = found.dead + left.dead, found.live + left.live


_PREFIX: Final = 48  # blocks: a fifth of the pool
_COMMAND: Final = "from kvgraph.advisor.cli import main; main()"


def first_turns(
    server: Server, client: OpenAI, words: Words, directory: Path, count: int
) -> list[float]:
    """Seconds until the first token of first turns, each behind ``kvgraph precache`` and then
    others' prompts that fill the pool.
    """
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
    rounds: int  # compacted chats


FULL: Final = Scale(turns=200, firsts=7, rounds=4)
QUICK: Final = Scale(turns=30, firsts=2, rounds=1)


def add_engine_figures(figures: Figures, scale: Scale, seed: int, say: Say) -> None:
    """Measure on stock vLLM, on the graph as it comes with layers, and where its policy ranks from
    the start.
    """
    with tempfile.TemporaryDirectory(prefix="kvg-", dir="/tmp") as scratch:
        bench = _Bench(Path(scratch), figures, scale, seed, say)
        bench.long_chat("stock", graph=False)
        bench.long_chat("graph", graph=True)
        bench.busy_chat()
        bench.branches()
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
        with self._server(chat_plan(self._model, graph, self._directory, name)) as (server, ledger):
            self._add_survival(f"{prefix}identity_survival", self._words(), server)
            if not graph:
                self._add_branches("stock_dead_branch_first", server, ledger)

    def first_turns(self, name: str, graph: bool) -> float:
        """First turns of a model that computes their prefix for long: their seconds, the median."""
        model = self._directory / "slow"
        if not model.is_dir():
            write_chat_model(model, SLOW_MODEL)
        with self._server(chat_plan(model, graph, self._directory, name)) as (server, _):
            client = client_of(server)
            found = first_turns(server, client, self._words(), self._directory, self._scale.firsts)
        self._say(f"{name}: first turns {[round(each, 3) for each in found]} s")
        figure = "first_turn" if graph else "stock_first_turn"
        self._figures.add(figure, [1000 * each for each in found], "ms", "")
        return float(np.median(found))

    def busy_chat(self) -> None:
        plan = chat_plan(self._model, True, self._directory, "busy")
        with self._server(plan) as (server, _), busy_cores():
            self._add_survival("identity_survival_busy", self._words(), server)

    def branches(self) -> None:
        plan = chat_plan(self._model, True, self._directory, "ruling", RULING)
        with self._server(plan) as (server, ledger):
            self._add_branches("dead_branch_first", server, ledger)

    def _add_survival(self, name: str, words: Words, server: Server) -> None:
        found = survival(client_of(server), words, self._scale.turns)
        self._say(f"{name}: {found}")
        target = "< 1" if name.startswith("stock") else "1"
        self._figures.add(name, found.turns, "of turns", target)
        self._figures.add(f"{name}_behind_others", found.bursts, "of turns", target)

    def _add_branches(self, name: str, server: Server, ledger: Ledger) -> None:
        found = dead_branches(server, client_of(server), ledger, self._words(), self._scale.rounds)
        self._say(f"{name}: {found}")
        target = "" if name.startswith("stock") else "≥ 0.95"
        self._figures.add(name, found.dead_first, "of blocks of chats", target)

    def _words(self) -> Words:
        return Words(self._model, self._seed)

    @contextlib.contextmanager
    def _server(self, plan: ServerPlan) -> Iterator[tuple[Server, Ledger]]:
        self._say(f"{plan.arm}: starting vLLM")
        with watched(plan, {}) as (server, ledger):
            yield server, ledger
