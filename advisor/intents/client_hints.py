"""``hints``: what a client says of its own request, for an OpenAI SDK's ``extra_body``.

client.chat.completions.create(
    model=…, messages=messages,
    extra_body=kvgraph.hints(
        session="chat-7",
        messages=[{"index": 0, "identity": "file:policy.md#0", "pinned": 60},
                  {"role": "tool", "priority": 20}],
    ),
)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypedDict

from ...graph.messages.fields import MAX_NAME
from ...graph.types import LAYER_BY_NAME, LAYER_NAMES


class MessageHint(TypedDict, total=False):
    """What is said of one message, by its index or of all of a role.

    ``importance`` is from 0 to 1, ``priority`` from 0 to 100; ``pinned`` is true, or for how many
    seconds.
    """

    index: int
    role: str
    layer: str
    importance: float
    priority: float
    pinned: bool | float
    identity: str
    memory_id: str


def hints(
    *,
    messages: Sequence[MessageHint] = (),
    session: str | None = None,
    tenant: str | None = None,
    waiting_for_tool: bool | None = None,
    expected_return_s: float | None = None,
    tool: str | None = None,
    session_ended: bool | None = None,
    secret: str | None = None,
    warming: bool | None = None,
) -> dict[str, Any]:
    """The fields that a request's body needs beside its own; see ``Use it`` in the README.

    Raises:
        ValueError: A message hint names neither an index nor a role, or an unknown layer or field,
            or a value is not allowed: says which, and what is.
    """
    said: dict[str, Any] = {
        "session": session, "tenant": tenant, "waiting_for_tool": waiting_for_tool,
        "expected_return_s": expected_return_s, "tool": tool, "session_ended": session_ended,
        "secret": secret, "warming": warming,
    }  # fmt: skip
    said = {name: value for name, value in said.items() if value is not None}
    _check("hints", said)
    if messages:
        said["messages"] = [_checked(each) for each in messages]
    return {"kv_transfer_params": {"kvgraph": said}}


def _checked(hint: MessageHint) -> dict[str, Any]:
    plain = {name: value for name, value in hint.items() if value is not None}
    if unknown := plain.keys() - MessageHint.__annotations__.keys():
        allowed = ", ".join(MessageHint.__annotations__)
        raise ValueError(f"{', '.join(sorted(unknown))}: a message hint has {allowed}")
    if ("index" in plain) == ("role" in plain):
        raise ValueError(f"{plain}: a message hint names an index or a role")
    if "layer" in plain and plain["layer"] not in LAYER_BY_NAME:
        raise ValueError(f"layer {plain['layer']!r} is none of {', '.join(LAYER_NAMES)}")
    _check("a message hint", plain)
    return plain


_LONGEST_S: Final = 1e9  # that an engine takes; bounds of leases are shorter
_MOST: Final = {
    "importance": 1.0, "priority": 100.0, "pinned": _LONGEST_S, "expected_return_s": _LONGEST_S,
}  # fmt: skip
_NAMES: Final = ("session", "tenant", "tool", "identity", "memory_id", "role")
_FARTHEST: Final = 1 << 31  # that an index may be; an engine takes 64 bits


def _check(where: str, said: dict[str, Any]) -> None:
    """Whether an engine would take these values; raises ValueError if not."""
    for name, value in said.items():
        if name in _MOST and not (isinstance(value, bool) and name == "pinned"):
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0 <= value <= _MOST[name]:
                raise ValueError(
                    f"{where}: {name} is {value!r}; allowed: a number from 0 to {_MOST[name]:g}"
                )
        if name in _NAMES and not (isinstance(value, str) and 0 < len(value) <= MAX_NAME):
            raise ValueError(f"{where}: {name} must be text of 1 to {MAX_NAME} characters")
        if name == "index" and not (type(value) is int and abs(value) <= _FARTHEST):
            raise ValueError(f"{where}: index is {value!r}; allowed: a message's number")
