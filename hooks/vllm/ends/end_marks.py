"""``EndMarks``: by which tokens and texts a model's answers end, as its chat template has it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec

from ..settings import ENDS_KEY, ENDS_VARIABLE, OFF

logger = logging.getLogger(__name__)

BRACKETS: Final = "]})"
"""What ends a call where the template puts nothing of its own behind its arguments."""

_Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_Tokens = Annotated[tuple[_Token, ...], msgspec.Meta(max_length=64)]
_Text = Annotated[str, msgspec.Meta(max_length=256)]


class EndMarks(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """How the answers of one model end.

    Attributes:
        turn_ends: Tokens that end an answer's turn.
        call_ends: Tokens that end an answer whose last part is a tool call.
        opener: The last special token before a tool's name; None if there is none.
        divider: The last special token between a tool's name and its arguments, where there is no
            opener.
        before: What stands between it and the name, or before the name; white space may differ.
        after: What stands behind the name: a character, or all up to the arguments where only its
            shape tells a call.
        closers: Texts with which a call ends, before any of the tokens above.
        model: Whose marks they are; empty: whichever engine reads them.
    """

    turn_ends: _Tokens
    call_ends: _Tokens = ()
    opener: _Token | None = None
    divider: _Token | None = None
    before: _Text = ""
    after: _Text = ""
    closers: Annotated[tuple[_Text, ...], msgspec.Meta(max_length=16)] = ()
    model: str = ""

    @property
    def by_shape(self) -> bool:
        """Whether only its beginning tells a call from other text that ends in a bracket."""
        return bool(self.closers) and set(self.closers) <= set(BRACKETS)

    @property
    def names_tools(self) -> bool:
        """Whether a tool's name can be found."""
        return bool(self.after) and (self.opener is not None or bool(self.before.strip()))

    def are_of(self, model: str) -> bool:
        """Whether an engine of this model may go by them."""
        return self.model in ("", model)

    def text(self) -> str:
        """The marks as they are handed over: one line of JSON."""
        return msgspec.json.encode(self).decode()


def read_marks(text: str) -> EndMarks:
    """What ``EndMarks.text`` gave, or what an operator wrote.

    Raises:
        ValueError: Names the field that is wrong.
    """
    return msgspec.json.decode(text, type=EndMarks)


def handed_over(extra_config: Mapping[str, Any], environment: Mapping[str, str]) -> EndMarks | None:
    """The marks that a connector's configuration has, or else the environment.

    What is malformed leaves a warning, and is ignored.
    """
    text = extra_config.get(ENDS_KEY) or environment.get(ENDS_VARIABLE)
    if not text or str(text).strip().lower() in OFF:
        return None
    try:
        return read_marks(str(text))
    except ValueError as error:
        logger.warning("kvgraph: %s is not understood: %s; it is ignored", ENDS_VARIABLE, error)
        return None
