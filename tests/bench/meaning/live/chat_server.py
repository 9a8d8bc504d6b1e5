"""A real vLLM server for chats, and an unmodified OpenAI client of it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ...serving.vllm_server import Server, ServerPlan

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
    """What to start; its sidecar's notes lie in ``runtime_of(directory)``.

    Args:
        settings: Further environment variables.
    """
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
