"""What every answer is: frozen, closed, and true at a moment."""

from __future__ import annotations

from typing import Literal

from fastapi import HTTPException
from pydantic import BaseModel, ConfigDict

from ...graph.types import BlockKey


class Part(BaseModel):
    """Base of whatever an answer is made of."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Answer(Part):
    """Base of an answer.

    Attributes:
        at: When it was true, in Unix seconds.
    """

    at: float


class Notice(Part):
    """Something that a person should know, in words.

    Attributes:
        text: One or two sentences: what is wrong and what to do about it.
        engine: Whose; None: the sidecar's own.
        view: The view of the page that shows more.
    """

    level: Literal["info", "warning", "serious"]
    text: str
    engine: str | None = None
    view: str | None = None


def parse_key(text: str) -> BlockKey:
    """A block key from decimal digits or ``0x`` and hexadecimal ones; HTTP 400 otherwise."""
    digits, base = (text[2:], 16) if text[:2].lower() == "0x" else (text, 10)
    if digits.isascii() and digits.isalnum():
        try:
            key = int(digits, base)
        except ValueError:
            key = -1
        if 0 <= key < 1 << 64:
            return key
    raise HTTPException(400, "a block key is a decimal number, or 0x and up to 16 hex digits")
