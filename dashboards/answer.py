"""Base classes of answers, block keys in text, and marks of how far a client has read a log."""

from __future__ import annotations

from math import inf
from typing import Any, Literal

import msgspec
import orjson
from fastapi import HTTPException
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict

from ..graph.types import BlockKey


class Part(BaseModel):
    """Base of all parts of an answer."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Answer(Part):
    """Base of an answer.

    Attributes:
        at: Time at which it was true, in Unix seconds.
    """

    at: float


class Notice(Part):
    """Something that a person should know, in words.

    Attributes:
        text: One or two sentences: what is wrong and what to do about it.
        engine: The engine concerned; None: the sidecar itself.
        view: The view of the page that shows more.
    """

    level: Literal["info", "warning", "serious"]
    text: str
    engine: str | None = None
    view: str | None = None


def as_json(content: Any, status_code: int = 200) -> Response:
    """Return structs, dataclasses and plain values as JSON, which browsers must not store."""
    body = orjson.dumps(content, default=_plain, option=orjson.OPT_NON_STR_KEYS)
    headers = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}
    return Response(body, status_code, headers, media_type="application/json")


def _plain(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return msgspec.structs.asdict(value)
    return str(value)


def parse_key(text: str) -> BlockKey:
    """Return a block key from decimal digits or ``0x`` and hexadecimal ones; HTTP 400 otherwise."""
    digits, base = (text[2:], 16) if text[:2].lower() == "0x" else (text, 10)
    if digits.isascii() and digits.isalnum():
        try:
            key = int(digits, base)
        except ValueError:
            key = -1
        if 0 <= key < 1 << 64:
            return key
    raise HTTPException(400, "a block key is a decimal number, or 0x and up to 16 hex digits")


# Marks: how far a client has read a log, as answers and events carry them.
#
# A mark is ``NAME-NUMBER``. Each log of each sidecar process has its own name, so that a mark from
# another engine's log or an earlier process is recognised.


def mark_of(name: str, number: int) -> str:
    """Return the mark of a record; the log's name must not contain ``-``."""
    return f"{name}-{number}"


def number_in(mark: str, name: str, end: float = inf) -> int | None:
    """Return the record of a mark of log ``name``; None for another's, or one from ``end`` on."""
    whose, _, number = mark.partition("-")
    is_number = number.isascii() and number.isdigit()
    known = int(number) if whose == name and is_number else None
    return known if known is not None and known < end else None
