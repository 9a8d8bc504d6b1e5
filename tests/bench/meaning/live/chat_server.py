"""A real vLLM server for chats, and an unmodified OpenAI client of it."""

from __future__ import annotations

import json
import random
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ...serving.model import ModelShape, ensure_model
from ...serving.vllm_server import Server, ServerPlan
from ..families import FAMILIES, write_tokenizer

if TYPE_CHECKING:
    from openai import OpenAI

POOL: Final = 240  # blocks
MOST_TOKENS: Final = 7168  # of a prompt and its answer: 200 turns, in less than the pool
RULING: Final = ("KVGRAPH_POLICY__GUARD", "false")
"""Lets the policy rank from the start: a short run is over before it has proved itself."""

Message = dict[str, Any]


class Reply(NamedTuple):
    """What a chat was answered.

    Attributes:
        cached: Tokens of its prompt that the engine had.
        first_s: Seconds until something of it came.
    """

    text: str
    cached: int
    first_s: float


def chat_plan(model: Path, graph: bool, directory: Path, name: str, *settings: tuple[str, str]) -> (
    ServerPlan
):  # fmt: skip
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
    """A client as anybody has it."""
    from openai import OpenAI

    return OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300)


def ask(client: OpenAI, messages: list[Message], tokens: int) -> Reply:
    """Have a chat answered, with so many tokens at most."""
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
    """A message."""
    return {"role": role, "content": text}


QUICK_MODEL: Final = ModelShape(
    hidden=128, layers=2, heads=2, kv_heads=2, intermediate=384, vocab=2112, max_tokens=8192
)
"""For what depends on no time."""
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
    """Makes texts of words that are one token each.

    Args:
        model: Whose tokens.
        seed: Of what is made.
    """

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
