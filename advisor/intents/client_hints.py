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
from typing import Any, TypedDict

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
        ValueError: A message hint names neither an index nor a role, or an unknown layer or field.
    """
    said: dict[str, Any] = {
        "session": session, "tenant": tenant, "waiting_for_tool": waiting_for_tool,
        "expected_return_s": expected_return_s, "tool": tool, "session_ended": session_ended,
        "secret": secret, "warming": warming,
    }  # fmt: skip
    said = {name: value for name, value in said.items() if value is not None}
    if messages:
        said["messages"] = [_checked(each) for each in messages]
    return {"kv_transfer_params": {"kvgraph": said}}


def _checked(hint: MessageHint) -> dict[str, Any]:
    plain = dict(hint)
    if unknown := plain.keys() - MessageHint.__annotations__.keys():
        allowed = ", ".join(MessageHint.__annotations__)
        raise ValueError(f"{', '.join(sorted(unknown))}: a message hint has {allowed}")
    if ("index" in plain) == ("role" in plain):
        raise ValueError(f"{plain}: a message hint names an index or a role")
    if "layer" in plain and plain["layer"] not in LAYER_BY_NAME:
        raise ValueError(f"layer {plain['layer']!r} is none of {', '.join(LAYER_NAMES)}")
    return plain
