"""``IntentClient``: tells a running sidecar what is wanted of blocks and sessions.

kv = IntentClient()                                  # of this user's only sidecar
kv.pin(session="chat-7", seconds=60)
kv.prefetch(identity="tool:search#3")                # "I shall need it"
kv.waiting("chat-7", tool="bash", expected_return_s=4)
"""

from __future__ import annotations

from typing import Any, TypedDict, Unpack

from ..remote import EditEndpoint, RefusedError

Reply = dict[str, Any]
"""``answer``, ``reason``, ``blocks``, ``asked`` and ``seconds``; see ``/v1/openapi.json``."""


class Of(TypedDict, total=False):
    """Which blocks are meant: one of the first four, and whose."""

    block: int
    session: str
    identity: str
    memory_id: str
    tenant: str


class IntentClient:
    """Sends one wish at a time; every method returns what became of it.

    Args:
        url: The sidecar's; None: that of this user's only one.
        token: The sidecar's; None: that of its runtime note, or the environment's.

    Raises:
        RemoteError: None is running, or several are. Every method raises it, too: where the
            sidecar does not answer, or knows no such token.
    """

    def __init__(self, url: str | None = None, token: str | None = None) -> None:
        self._endpoint = EditEndpoint("/v1/intents", url, token)

    def pin(self, seconds: float | None = None, **of: Unpack[Of]) -> Reply:
        """Keep blocks for some seconds, as far as leases may."""
        return self._wish("pin", of, seconds=seconds)

    def retain(self, importance: float, **of: Unpack[Of]) -> Reply:
        """Value blocks so much, from 0 to 1."""
        return self._wish("retain", of, importance=importance)

    def demote(self, **of: Unpack[Of]) -> Reply:
        """Let blocks go first."""
        return self._wish("demote", of)

    def prefetch(self, seconds: float | None = None, **of: Unpack[Of]) -> Reply:
        """Bring copies of blocks back, as room allows."""
        return self._wish("prefetch", of, seconds=seconds)

    def share(self, **of: Unpack[Of]) -> Reply:
        """Say that other sessions will use blocks too."""
        return self._wish("share", of)

    def waiting(
        self,
        session: str,
        tool: str | None = None,
        expected_return_s: float | None = None,
        tenant: str | None = None,
    ) -> Reply:
        """Say that a session waits for a tool."""
        return self._wish(
            "signal", _of(session, tenant), waiting_for_tool=True, tool=tool,
            expected_return_s=expected_return_s,
        )  # fmt: skip

    def turn_ended(self, session: str, tenant: str | None = None) -> Reply:
        """Say that somebody reads a session's last answer."""
        return self._wish("signal", _of(session, tenant), waiting_for_tool=False)

    def ended(self, session: str, tenant: str | None = None) -> Reply:
        """Say that a session is over."""
        return self._wish("signal", _of(session, tenant), session_ended=True)

    def _wish(self, kind: str, of: Of, **fields: object) -> Reply:
        wish = {"kind": kind, **of, **{k: v for k, v in fields.items() if v is not None}}
        if "block" in wish:
            wish["block"] = str(wish["block"])
        try:
            (reply,) = self._endpoint.send({"intents": [wish]})["answers"]
        except RefusedError as error:
            return {"answer": "rejected", "reason": str(error), "blocks": 0, "asked": 0,
                    "seconds": None}  # fmt: skip
        answered: Reply = reply
        return answered


def _of(session: str, tenant: str | None) -> Of:
    return {"session": session} if tenant is None else {"session": session, "tenant": tenant}
