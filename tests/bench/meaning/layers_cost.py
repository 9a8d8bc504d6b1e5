"""``layers_cost_…``: what marking a chat's layers costs the API process."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from kvgraph.hooks.settings import LAYERS_VARIABLE
from kvgraph.hooks.vllm.api.chats import mark_chats
from kvgraph.hooks.vllm.patching import restored

from ..figures import Figures
from .chat_layers import FamilyChats, MadeChat
from .families import FAMILIES

_ROUNDS: Final = 9
_QUICK: Final = 3
_LONGEST: Final = 4_000_000  # tokens: the toy models' tokens are short
_WORDS: Final = "The tests of the second module fail since the change of yesterday. "


def add_layers_cost(figures: Figures, quick: bool, say: Callable[[str], None]) -> None:
    """Render two large chats with vLLM's own renderer, with and without us in turns."""
    family = next(each for each in FAMILIES if each.mode == "hf" and each.template is not None)
    with (
        tempfile.TemporaryDirectory(prefix="kvgraph-meaning-") as scratch,
        contextlib.closing(FamilyChats(family, Path(scratch, family.name))) as chats,
    ):
        assert chats.table is not None
        chats.config.model_config.max_model_len = _LONGEST
        with patch.dict(os.environ, {LAYERS_VARIABLE: chats.table.text()}):
            for name, messages in (
                ("2000_messages", _chat(2000, 1)),
                ("1m_chars", _chat(20, 50_000 // len(_WORDS) + 1)),
            ):
                spent = _in_turns(chats, messages, _QUICK if quick else _ROUNDS)
                ours = [1000 * (with_us - stock) for stock, with_us in spent]
                say(f"{family.name}, {name}: {[round(1000 * each) for each, _ in spent]} ms, stock")
                figures.add(f"layers_cost_ms_{name}", ours, "ms of the API process", "reported")
                ratios = [with_us / stock for stock, with_us in spent]
                figures.add(
                    f"layers_cost_ratio_{name}", ratios, "× vLLM's own rendering", "reported"
                )


def _chat(messages: int, sentences: int) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    turns = [
        {"role": roles[at % 2], "content": f"{at}: {_WORDS * sentences}"}
        for at in range(messages - 1)
    ]
    return [{"role": "system", "content": _WORDS * sentences}, *turns]


def _in_turns(
    chats: FamilyChats, messages: list[dict[str, Any]], rounds: int
) -> list[tuple[float, float]]:
    """CPU seconds of one rendering, stock and with us; the first round is not counted."""

    def spent() -> float:
        chat, began = MadeChat(messages, None, []), time.process_time()
        chats.rendered(chat)
        return time.process_time() - began

    found = []
    for _ in range(rounds + 1):
        stock = spent()
        with restored():
            mark_chats()
            found.append((stock, spent()))
    return found[1:]
