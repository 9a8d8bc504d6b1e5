"""Words a refusal by the message's field names, where msgspec counts positions (``$[0][1][2]``)."""

from __future__ import annotations

import re
import types
import typing
from typing import Any, Final

import msgspec

BAD_PAYLOAD: Final = (
    msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError,
)  # fmt: skip
"""What decoding may raise: malformed text and absurd nesting come as errors of others."""

_PATH: Final = re.compile(r" - at `\$(?P<steps>[^`]*)`$")
_STEP: Final = re.compile(r"\[(\d+|\.\.\.)\]|\.(\w+)")


def refusal(error: BaseException, kind: type[msgspec.Struct]) -> str:
    """What is wrong with a message of type ``kind``: the field's name, and what is allowed.

    Args:
        error: As decoding it raised it; its text holds no value of the message.
    """
    text = str(error) or type(error).__name__
    found = _PATH.search(text)
    if found is None:
        return f"{kind.__name__}: {text}"
    return f"{kind.__name__}{_field(kind, found['steps'])}: {text[: found.start()]}"


def _field(kind: type[msgspec.Struct], steps: str) -> str:
    """``.field[0].field`` for ``[1][0][3]``."""
    words, here = "", kind
    for position, name in _STEP.findall(steps):
        within = _struct_in(here)
        if name or within is None or not position.isdigit():
            words += f".{name}" if name else f"[{position}]"
            here = _type_of(within, name) if within is not None and name else _item(here)
            continue
        tagged = within.__struct_config__.tag is not None
        fields = msgspec.structs.fields(within)
        place = int(position) - tagged
        if not 0 <= place < len(fields):
            return words
        words += f".{fields[place].name}"
        here = fields[place].type
    return words


def _struct_in(kind: Any) -> Any:
    """The message type that ``kind`` is, or the one in a union; None for a plain type."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind
    return None


def _type_of(kind: Any, name: str) -> Any:
    return next((f.type for f in msgspec.structs.fields(kind) if f.name == name), None)


def _item(kind: Any) -> Any:
    """The type of a list's or tuple's items."""
    inner = [each for each in typing.get_args(kind) if each is not Ellipsis]
    if typing.get_origin(kind) in (typing.Annotated, typing.Union, types.UnionType):
        return _item(inner[0])
    return inner[0] if inner else None
