"""``identity_survival``: whether a long chat's system text stays in a full pool, nobody annotates.

An unmodified OpenAI client talks over ``/v1/chat/completions``; now and then others send more new
text than the pool holds. The engine's own report of cached tokens says what survived.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ..serving.model import ModelShape, ensure_model
from ..serving.vllm_server import Server, ServerPlan, check_advised
from ..serving.workload import BLOCK

if TYPE_CHECKING:
    from openai import OpenAI

_SHAPE: Final = ModelShape(hidden=128, layers=2, heads=2, kv_heads=2, intermediate=384,
                           max_tokens=8192)  # fmt: skip
_POOL: Final = 240  # blocks
_SYSTEM: Final = 8  # blocks of the system text
_OTHERS: Final = 60  # blocks of a prompt of another client
_SAID: Final = 8  # tokens that a turn brings, beside its answer
_ANSWER: Final = 4
_BURST_EVERY: Final = 10  # turns
_TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|> {{ message.role }} {{ message.content }} "
    "<|im_end|> {% endfor %}{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)
_SPECIAL: Final = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
_ROLES: Final = ("system", "user", "assistant")


class Survival(NamedTuple):
    """What one server's cache kept.

    Attributes:
        turns: That found the whole system text, of all but the first.
        pool_use: The least share of the pool that held blocks when a turn behind others' came.
    """

    turns: float
    pool_use: float


def write_chat_model(directory: Path) -> Path:
    """A random Llama that knows words, roles, and the borders of messages."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    shutil.copytree(ensure_model(_SHAPE), directory)
    words = [*_SPECIAL, *_ROLES]
    words += [f"w{number}" for number in range(len(words), _SHAPE.vocab)]
    numbered = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(numbered, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(_SPECIAL))
    tokenizer.save(str(directory / "tokenizer.json"))
    path = directory / "tokenizer_config.json"
    settings = {**json.loads(path.read_text()), "chat_template": _TEMPLATE,
                "eos_token": "<|im_end|>"}  # fmt: skip
    path.write_text(json.dumps(settings))
    return directory


def survival(model: Path, graph: bool, directory: Path, turns: int, seed: int,
             busy: bool = False) -> Survival:  # fmt: skip
    """Talk for ``turns`` turns to a server, with or without the graph.

    Args:
        busy: Whether two other processes want both cores meanwhile.
    """
    from openai import OpenAI

    plan = ServerPlan(
        str(model), graph, directory, blocks=_POOL, max_model_len=4096, max_num_seqs=4,
        name=f"{'graph' if graph else 'stock'}{'-busy' if busy else ''}",
        settings=(("AITHER_KVCACHE_HINTS", "session"), ("AITHER_KVCACHE_LAYERS", "1"),
                  ("KVGRAPH_SCORE__INFERRED_SHARE", "0.125")) if graph else (),
    )  # fmt: skip
    with Server(plan) as server, _busy_cores(2 if busy else 0):
        if graph:
            check_advised(server)
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300)
        return _talk(client, turns, random.Random(seed))


def _talk(client: OpenAI, turns: int, rng: random.Random) -> Survival:
    messages: list[dict[str, Any]] = [{"role": "system", "content": _words(_SYSTEM * BLOCK, rng)}]
    kept, least_use = 0, 1.0
    for turn in range(turns):
        if turn and turn % _BURST_EVERY == 0:
            least_use = min(least_use, _burst(client, rng))
        messages.append({"role": "user", "content": _words(_SAID, rng)})
        answer, cached = _ask(client, messages, _ANSWER)
        messages.append({"role": "assistant", "content": answer})
        kept += bool(turn) and cached >= _SYSTEM * BLOCK
    return Survival(kept / max(1, turns - 1), least_use)


def _burst(client: OpenAI, rng: random.Random) -> float:
    """Others send more than the pool holds; the share of the pool that their last prompts fill
    is what is in use at least."""
    prompts = -(-3 * _POOL // (2 * _OTHERS))
    for _ in range(prompts):
        text = _words(_OTHERS * BLOCK - 8, rng)
        _ask(client, [{"role": "user", "content": text}], 1)
    return min(1.0, prompts * _OTHERS / _POOL)


def _ask(client: OpenAI, messages: list[Any], tokens: int) -> tuple[str, int]:
    """An answer, and how many tokens of its prompt were cached."""
    reply = client.chat.completions.create(
        model="demo", messages=messages, max_tokens=tokens, temperature=0
    )
    details = reply.usage.prompt_tokens_details if reply.usage else None
    cached = details.cached_tokens if details else 0
    return reply.choices[0].message.content or "w9", cached or 0


def _words(count: int, rng: random.Random) -> str:
    return " ".join(f"w{rng.randrange(len(_SPECIAL) + 3, _SHAPE.vocab)}" for _ in range(count))


@contextmanager
def _busy_cores(count: int) -> Iterator[None]:
    """Processes that want a core each."""
    spinning = [multiprocessing.get_context("spawn").Process(target=_spin, daemon=True)
                for _ in range(count)]  # fmt: skip
    for each in spinning:
        each.start()
    try:
        yield
    finally:
        for each in spinning:
            each.kill()
            each.join()


def _spin() -> None:
    while True:
        pass
