"""``POST /v1/intents``: pins, demotions and other requests of operators and agent frameworks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Final, Literal

from fastapi import APIRouter, Depends
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field, StrictBool, field_validator, model_validator

from ...graph.intents import Intent, IntentAnswer, IntentKind, Target, Verdict
from ...graph.kvcache_graph import KVCacheGraph
from ...graph.wire.events import SessionSignal
from .page import Page, answered

MOST_WISHES: Final = 256  # in one call; chosen
_KEY: Final = r"^(0[xX][0-9a-fA-F]{1,16}|[0-9]{1,20})$"
_Name = Annotated[str, Field(min_length=1, max_length=256)]
_Seconds = Annotated[float, Field(ge=0.0, le=1e9, allow_inf_nan=False, strict=True)]
_OF_ALL: Final = {"kind", "block", "session", "identity", "memory_id", "tenant"}
_OF_KIND: Final = {
    "pin": {"seconds"}, "retain": {"importance"}, "demote": set[str](), "prefetch": {"seconds"},
    "share": set[str](),
    "signal": {"waiting_for_tool", "expected_return_s", "tool", "session_ended"},
}  # fmt: skip


class _Closed(BaseModel):
    """Base of all: what is not known is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class IntentWish(_Closed):
    """One intent. It names exactly one of ``block``, ``session``, ``identity`` and ``memory_id``.

    Attributes:
        kind: What to do; ``signal`` states what a session is doing, as a request may.
        block: A key, in decimal or ``0x`` and hexadecimal digits: this block and all before it.
        session: All blocks that its last turn walked.
        identity: The segments of this name; or one block of them, given by its number, as in
            ``name#0``.
        memory_id: All blocks that refer to this memory.
        tenant: Only this tenant's blocks and sessions are affected.
        seconds: How long a lease or a prefetch order lasts; None: as long as allowed.
        importance: The importance that ``retain`` sets.
        waiting_for_tool, expected_return_s, tool, session_ended: Only for ``signal``.
    """

    kind: Literal["pin", "retain", "demote", "prefetch", "share", "signal"]
    block: Annotated[str, Field(pattern=_KEY)] | None = None
    session: _Name | None = None
    identity: _Name | None = None
    memory_id: _Name | None = None
    tenant: _Name | None = None
    seconds: _Seconds | None = None
    importance: Annotated[float, Field(ge=0.0, le=1.0, strict=True)] = 1.0
    waiting_for_tool: StrictBool | None = None
    expected_return_s: _Seconds | None = None
    tool: _Name | None = None
    session_ended: StrictBool = False

    @model_validator(mode="after")
    def _says_what_its_kind_does(self) -> IntentWish:
        allowed = _OF_ALL | _OF_KIND[self.kind]
        said = {name for name in self.model_fields_set if getattr(self, name) is not None}
        if unused := sorted(said - allowed):
            fields = ", ".join(sorted(allowed))
            raise ValueError(f"{self.kind!r} has no {', '.join(unused)}; allowed: {fields}")
        return self

    @property
    def key(self) -> int | None:
        return None if self.block is None else _key_of(self.block)

    @field_validator("block")
    @classmethod
    def _has_64_bits(cls, block: str | None) -> str | None:
        if block is not None and _key_of(block) >> 64:
            raise ValueError("a block's key has 64 bits at most")
        return block


def _key_of(block: str) -> int:
    return int(block, 16 if "x" in block.lower() else 10)


class IntentWishes(_Closed):
    """All intents of one call; they are applied and answered one by one, in order."""

    intents: Annotated[list[IntentWish], Field(max_length=MOST_WISHES)]


class IntentReply(_Closed):
    """The outcome of an intent.

    Attributes:
        answer: ``clipped``: up to a bound, or for the known blocks; ``deferred``: it will be done
            as room allows; ``missing``: nothing that it names is known.
        reason: The same in words.
        blocks: Number of blocks it was applied to, of ``asked``.
        seconds: How long it lasts; None: no time limit.
    """

    answer: Verdict
    reason: str
    blocks: int
    asked: int
    seconds: float | None


class IntentReplies(_Closed):
    """One reply for each intent, in order.

    Attributes:
        at: Time at which this was true, in Unix seconds.
    """

    at: float
    answers: list[IntentReply]


def add_routes(paths: APIRouter, page: Page, edits: Callable[..., None]) -> None:
    @paths.post("/intents", response_model=IntentReplies, dependencies=[Depends(edits)])
    def intend(wishes: IntentWishes) -> Response:
        return answered(replies_of(page, wishes))


def replies_of(page: Page, wishes: IntentWishes) -> IntentReplies:
    """Apply intents to the graph, in order, and return the outcome of each. Raises BusyError."""
    with page.questions.turn():
        page.graph.changes.all_changed()
        replies = [_reply(_done(page.graph, wish)) for wish in wishes.intents]
    if any(each.answer not in (Verdict.REJECTED, Verdict.MISSING) for each in replies):
        page.intended()
    return IntentReplies(at=page.unix.now(), answers=replies)


def _done(graph: KVCacheGraph, wish: IntentWish) -> IntentAnswer:
    if wish.kind == "signal":
        return _signalled(graph, wish)
    target = Target(wish.key, wish.session, wish.identity, wish.memory_id, wish.tenant)
    return graph.intents.apply(Intent(IntentKind(wish.kind), target, wish.seconds, wish.importance))


def _signalled(graph: KVCacheGraph, wish: IntentWish) -> IntentAnswer:
    if wish.session is None:
        return IntentAnswer(Verdict.REJECTED, "a signal is about a session")
    said = SessionSignal(
        wish.session, wish.tenant, wish.waiting_for_tool, wish.expected_return_s,
        wish.session_ended, wish.tool,
    )  # fmt: skip
    return graph.intents.signal(said)


def _reply(answer: IntentAnswer) -> IntentReply:
    said = asdict(answer)
    return IntentReply(answer=said.pop("verdict"), **said)
