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

from collections.abc import Mapping, Sequence
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
    """The fields that a request's body needs beside its own; see docs/hints.md.

    Raises:
        ValueError: A field is unknown, or its value is not what the docs allow: says which, and
            what is allowed. What gets to an engine otherwise is left out there, with a warning.
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
    if not isinstance(hint, Mapping):
        raise ValueError(f"{hint!r} is no message hint; allowed: an object")
    if unknown := hint.keys() - MessageHint.__annotations__.keys():
        allowed = ", ".join(MessageHint.__annotations__)
        raise ValueError(f"{', '.join(sorted(unknown))}: a message hint has {allowed}")
    plain = {name: value for name, value in hint.items() if value is not None}
    if ("index" in plain) == ("role" in plain):
        raise ValueError(f"{dict(hint)}: a message hint names an index or a role")
    _check("a message hint", plain)
    return plain


_LONGEST_S: Final = 1e9  # of a lease or a pause; chosen, engines keep leases for less
_MOST: Final = {
    "importance": 1.0, "priority": 100.0, "pinned": _LONGEST_S, "expected_return_s": _LONGEST_S,
}  # fmt: skip
_NAMES: Final = ("session", "tenant", "tool", "identity", "memory_id", "role")
_FLAGS: Final = ("waiting_for_tool", "session_ended", "warming")
_MAX_INDEX: Final = (1 << 31) - 1


def _check(where: str, said: Mapping[str, Any]) -> None:
    """Raise ValueError for the first value that is not allowed."""
    for name, value in said.items():
        if (allowed := _allowed(name, value)) is not None:
            raise ValueError(f"{where}: {name} is {str(value)[:40]!r}; allowed: {allowed}")


def _allowed(name: str, value: Any) -> str | None:
    """What a field may be, if it is something else."""
    if name in _MOST and not (isinstance(value, bool) and name == "pinned"):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        fits = number and 0 <= value <= _MOST[name]
        return None if fits else f"a number from 0 to {_MOST[name]:g}"
    if name in _NAMES:
        named = isinstance(value, str) and 0 < len(value) <= MAX_NAME
        return None if named else f"text of 1 to {MAX_NAME} characters"
    if name in _FLAGS:
        return None if isinstance(value, bool) else "true or false"
    if name == "index":
        whole = type(value) is int and abs(value) <= _MAX_INDEX
        return None if whole else f"an integer, at most {_MAX_INDEX} from 0"
    if name == "layer":
        known = isinstance(value, str) and value in LAYER_BY_NAME
        return None if known else f"one of {', '.join(LAYER_NAMES)}"
    return None
