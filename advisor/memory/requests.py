"""``ChatRequest``: a chat request, with its client's hints about messages and memory."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import orjson

from ..fleet.callers import HINTS, XARGS, BadRequestError, hints_in
from ..fleet.prompts import CHARACTERS_PER_TOKEN
from .chat import Message, is_message

CACHE_SALT: Final = "cache_salt"
_PARAMS, _MEMORY, _RECALL = "kv_transfer_params", "memory", "recall"
_TAGS: Final = frozenset(
    {"layer", "importance", "priority", "pinned", "identity", "memory_id"}
)  # of a message's hints: docs/hints.md
_NOT_SENT: Final = (_MEMORY, "messages")  # fields of the client's hints that are replaced by ours
_APPEND, _OFF = "append", "off"
_LIMITS: Final = ("max_completion_tokens", "max_tokens")


class ChatRequest(NamedTuple):
    fields: dict[str, Any]  # the body's fields
    messages: list[Message]  # the client's messages
    appends: bool  # whether they continue the chat instead of repeating it
    tags: dict[int, dict[str, Any]]  # hints about messages, by message number

    @property
    def model(self) -> object:
        return self.fields.get("model")

    @property
    def answer(self) -> int:
        """Most tokens of the answer; 0 if the request states none."""
        said = [self.fields.get(name) for name in _LIMITS]
        return next((each for each in said if isinstance(each, int) and each > 0), 0)

    @property
    def fixed(self) -> int:
        """Approximate tokens of the tools' descriptions."""
        tools = self.fields.get("tools")
        return len(orjson.dumps(tools)) // CHARACTERS_PER_TOKEN if tools else 0

    def body(
        self,
        messages: Sequence[Message],  # in place of the client's
        tags: Sequence[object],  # hints about those
        recalls: bool,  # whether recall is asked for, unless the client says otherwise
        salt: str = "",  # cache salt in place of the client's, where text may come back
    ) -> bytes:
        ours = {name: said for name, said in hints_in(self.fields).items() if name not in _NOT_SENT}
        ours |= {"messages": tags} if tags else {}
        ours = ({_RECALL: True} if recalls else {}) | ours
        salted = {CACHE_SALT: salt} if salt and ours.get(_RECALL) else {}
        return self._with(messages, {HINTS: ours}, salted)

    def plain(self, messages: Sequence[Message]) -> bytes:
        """Return the body for an engine that rejects hints, with ``messages`` as its messages."""
        return self._with(messages, {HINTS: {}})

    def _with(
        self, messages: Sequence[Message], ours: dict[str, Any], more: Mapping[str, object] = {}
    ) -> bytes:
        theirs = self.fields.get(_PARAMS)
        params = (theirs if isinstance(theirs, dict) else {}) | ours
        params = {name: value for name, value in params.items() if value}
        fields = {name: value for name, value in self.fields.items() if name != _PARAMS}
        if isinstance(xargs := fields.get(XARGS), dict):  # what it says of hints, ours say too
            fields[XARGS] = {name: value for name, value in xargs.items() if name != HINTS}
        return orjson.dumps(
            fields | {"messages": messages, **more} | ({_PARAMS: params} if params else {})
        )


def read_chat_request(body: bytes) -> ChatRequest | None:
    """Parse a body; None if it is no chat or wants no memory. Raises BadRequestError."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    messages = fields.get("messages") if isinstance(fields, dict) else None
    if not isinstance(messages, list) or not messages:
        return None
    if not all(map(is_message, messages)):
        return None
    ours = hints_in(fields)
    memory = ours.get(_MEMORY)
    if memory not in (None, _APPEND, _OFF):
        raise BadRequestError(
            f'"{_MEMORY}": {reprlib.repr(memory)} among the hints: allowed: "{_APPEND}", "{_OFF}"'
        )
    if memory == _OFF or fields.get("n") not in (None, 1):
        return None
    return ChatRequest(fields, messages, memory == _APPEND, _tags(ours, messages))


def with_salt(body: bytes, salt_for: Callable[[object], str]) -> bytes:
    """Return a body in its client's own form, with its cache salt replaced by ``salt_for`` of it if
    it asks for recall. Raises BadRequestError.
    """
    if _RECALL.encode() not in body:  # escaped, it only joins others without a salt of ours
        return body
    try:
        fields = orjson.loads(body)
        if not isinstance(fields, dict) or not hints_in(fields).get(_RECALL):
            return body
        salt = salt_for(fields.get(CACHE_SALT))
        return orjson.dumps(fields | {CACHE_SALT: salt}) if salt else body
    except orjson.JSONDecodeError:
        return body
    except orjson.JSONEncodeError:
        raise BadRequestError("a request for recall is nested too deeply") from None


def _tags(ours: Mapping[str, Any], messages: Sequence[Message]) -> dict[int, dict[str, Any]]:
    """Return the hints about each message, by number or role; the last of each kind wins."""
    said: dict[int | str, dict[str, tuple[int, Any]]] = {}  # with the numbers of hints
    listed = ours.get("messages")
    for order, hint in enumerate(listed if isinstance(listed, list) else ()):
        if not isinstance(hint, dict):
            continue
        index, role = hint.get("index"), hint.get("role")
        if isinstance(index, int):
            of: int | str = index if index >= 0 else index + len(messages)
        elif isinstance(role, str):
            of = role
        else:
            continue
        tags = {name: (order, hint[name]) for name in _TAGS & hint.keys()}
        said.setdefault(of, {}).update(tags)
    found: dict[int, dict[str, Any]] = {}
    for number, message in enumerate(messages):
        role = message.get("role")
        of_role = said.get(role, {}) if isinstance(role, str) else {}
        words = [*said.get(number, {}).items(), *of_role.items()]
        if words:
            words.sort(key=lambda word: word[1][0])
            found[number] = {name: tag for name, (_, tag) in words}
    return found
