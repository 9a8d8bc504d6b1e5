"""Reads tokens as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def decoder(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    """Tokens as text, special ones too; nothing where there is no tokenizer."""

    def decode(tokens: Sequence[int]) -> str:
        if tokenizer is None or not len(tokens):
            return ""
        return str(tokenizer.decode(list(tokens), skip_special_tokens=False))

    return decode
