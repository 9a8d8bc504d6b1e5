"""A small model that chats, and texts of as many tokens as wanted."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Final

from ...serving.model import ModelShape, ensure_model
from ..families import FAMILIES
from ..family_models import write_tokenizer

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
