"""A stable prefix: what all turns of a kind begin with, up to a mark from which it is dropped."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from ...graph.errors import ConfigError

Message = dict[str, Any]
Render = Callable[[Mapping[str, str]], Sequence[Message]]
"""Makes the messages of a turn of its variables; what varies stands behind the mark."""

NOTHING: Final = "."
"""What a warming request's last message says, in place of what a user will."""


def stable_messages(render: Render, drop_from: str, variables: Mapping[str, str]) -> list[Message]:
    """The messages before the mark; the one that holds it is cut there.

    What renders the real turns renders this, so that both begin byte for byte alike.

    Args:
        drop_from: The mark: it stands where a turn's own text begins.

    Raises:
        ConfigError: No message holds the mark: the whole turn would count as stable. Or these are
            no messages.
    """
    kept: list[Message] = []
    for message in as_messages(render({**variables, "drop_from": drop_from})):
        content = message.get("content")
        if isinstance(content, str) and drop_from in content:
            before = content[: content.index(drop_from)]
            return [*kept, {**message, "content": before}] if before else kept
        kept.append(message)
    raise ConfigError(f"drop_from = {drop_from!r}: no message holds it")


def as_messages(made: object, what: str = "messages") -> list[Message]:
    """Messages, or ``what`` else is such a list, checked: objects that JSON can hold.

    Raises:
        ConfigError: They are something else; says what.
    """
    if not isinstance(made, list | tuple):
        raise ConfigError(f"{what}: {type(made).__name__!r}; allowed: a list of objects")
    for number, each in enumerate(made):
        if not isinstance(each, Mapping):
            kind = type(each).__name__
            raise ConfigError(f"{what}[{number}]: {kind!r}; allowed: an object")
        try:
            json.dumps(each)
        except (TypeError, ValueError, RecursionError) as error:  # a date, a circle
            raise ConfigError(f"{what}[{number}] holds what JSON cannot: {error}") from None
    return [dict(each) for each in made]


def warming_messages(stable: Sequence[Message]) -> list[Message]:
    """What is sent to have a stable prefix computed: templates want a user's message at the end."""
    if stable and stable[-1].get("role") == "user":
        return [*stable]
    return [*stable, {"role": "user", "content": NOTHING}]
