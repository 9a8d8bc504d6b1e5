"""``IntentClient`` states intents to a running sidecar; ``hints`` builds a request's own.

kv = IntentClient()                                  # of this user's only sidecar
kv.pin(session="chat-7", seconds=60)
kv.prefetch(identity="tool:search#3")                # "I shall need it"
kv.waiting("chat-7", tool="bash", expected_return_s=4)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypedDict, Unpack

from ...graph.types import LAYER_BY_NAME, LAYER_NAMES
from ...graph.wire.events import MAX_NAME
from ..tools.remote import EditEndpoint, RefusedError

Reply = dict[str, Any]
"""``answer``, ``reason``, ``blocks``, ``asked`` and ``seconds``; see ``/v1/openapi.json``."""


class IntentTarget(TypedDict, total=False):
    """The target of an intent: one of the first four fields, and its tenant."""

    block: int
    session: str
    identity: str
    memory_id: str
    tenant: str


class IntentClient:
    """Sends one intent at a time; every method returns its outcome.

    Args:
        url: The sidecar's URL; None: that of this user's only sidecar.
        token: The sidecar's token; None: from its runtime file or the environment.

    Raises:
        RemoteError: No sidecar is running, or several are. Every method raises it as well, if the
            sidecar does not answer or rejects the token.
    """

    def __init__(self, url: str | None = None, token: str | None = None) -> None:
        self._endpoint = EditEndpoint("/v1/intents", url, token)

    def pin(self, seconds: float | None = None, **of: Unpack[IntentTarget]) -> Reply:
        """Keep blocks for some seconds, as far as lease bounds allow."""
        return self._send("pin", of, seconds=seconds)

    def retain(self, importance: float, **of: Unpack[IntentTarget]) -> Reply:
        """Set blocks' importance, from 0 to 1."""
        return self._send("retain", of, importance=importance)

    def demote(self, **of: Unpack[IntentTarget]) -> Reply:
        """Let blocks be evicted first."""
        return self._send("demote", of)

    def prefetch(self, seconds: float | None = None, **of: Unpack[IntentTarget]) -> Reply:
        """Load copies of blocks back, as room allows."""
        return self._send("prefetch", of, seconds=seconds)

    def share(self, **of: Unpack[IntentTarget]) -> Reply:
        """State that other sessions will use these blocks as well."""
        return self._send("share", of)

    def waiting(
        self,
        session: str,
        tool: str | None = None,
        expected_return_s: float | None = None,
        tenant: str | None = None,
    ) -> Reply:
        """State that a session waits for a tool."""
        return self._send(
            "signal", _of(session, tenant), waiting_for_tool=True, tool=tool,
            expected_return_s=expected_return_s,
        )  # fmt: skip

    def turn_ended(self, session: str, tenant: str | None = None) -> Reply:
        """State that a session's last answer ended its turn: a person reads it."""
        return self._send("signal", _of(session, tenant), waiting_for_tool=False)

    def ended(self, session: str, tenant: str | None = None) -> Reply:
        """State that a session has ended."""
        return self._send("signal", _of(session, tenant), session_ended=True)

    def _send(self, kind: str, of: IntentTarget, **fields: object) -> Reply:
        intent = {"kind": kind, **of, **{k: v for k, v in fields.items() if v is not None}}
        if "block" in intent:
            intent["block"] = str(intent["block"])
        try:
            (reply,) = self._endpoint.send({"intents": [intent]})["answers"]
        except RefusedError as error:
            return {"answer": "rejected", "reason": str(error), "blocks": 0, "asked": 0,
                    "seconds": None}  # fmt: skip
        answered: Reply = reply
        return answered


def _of(session: str, tenant: str | None) -> IntentTarget:
    return {"session": session} if tenant is None else {"session": session, "tenant": tenant}


# client.chat.completions.create(
#     model=…,
#     messages=messages,
#     extra_body=kvgraph.hints(
#         session="chat-7",
#         messages=[
#             {"index": 0, "identity": "file:policy.md#0", "pinned": 60},
#             {"role": "tool", "priority": 20},
#         ],
#     ),
# )


class MessageHint(TypedDict, total=False):
    """A hint on one message, given by its index, or on all messages of a role. ``importance`` is
    from 0 to 1, ``priority`` from 0 to 100; ``pinned`` is true or a number of seconds.
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
    """Build the extra fields of a request's body; see docs/hints.md.

    Raises:
        ValueError: A field is unknown or its value is not allowed; the message says what is.
            (Without this check the engine drops such a hint, with a warning.)
    """
    fields: dict[str, Any] = {
        "session": session, "tenant": tenant, "waiting_for_tool": waiting_for_tool,
        "expected_return_s": expected_return_s, "tool": tool, "session_ended": session_ended,
        "secret": secret, "warming": warming,
    }  # fmt: skip
    fields = {name: value for name, value in fields.items() if value is not None}
    _check("hints", fields)
    if messages:
        fields["messages"] = [_checked(each) for each in messages]
    return {"kv_transfer_params": {"kvgraph": fields}}


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


_LONGEST_S: Final = 1e9  # longest lease or pause; chosen, engines keep leases for less
_MOST: Final = {
    "importance": 1.0, "priority": 100.0, "pinned": _LONGEST_S, "expected_return_s": _LONGEST_S,
}  # fmt: skip
_NAMES: Final = ("session", "tenant", "tool", "identity", "memory_id", "role")
_FLAGS: Final = ("waiting_for_tool", "session_ended", "warming")
_MAX_INDEX: Final = (1 << 31) - 1


def _check(where: str, fields: Mapping[str, Any]) -> None:
    """Raise ValueError for the first value that is not allowed."""
    for name, value in fields.items():
        if (allowed := _allowed(name, value)) is not None:
            raise ValueError(f"{where}: {name} is {str(value)[:40]!r}; allowed: {allowed}")


def _allowed(name: str, value: Any) -> str | None:
    """What a field's value may be, if ``value`` is not allowed; None if it is."""
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
