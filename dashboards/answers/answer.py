"""What every answer is: frozen, closed, and true at a moment."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


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
