"""What a request says of itself: whose it is, which session it continues, how long it is."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import AsyncIterator, Mapping
from enum import IntEnum
from itertools import count
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

import orjson

from .prompt_chains import LastPrompts, Prompt, PromptReader

Headers = list[tuple[bytes, bytes]]

MOST_BODY: Final = 64 << 20
"""Bytes of a request's body; chosen: several times the longest context in JSON."""
MOST_NAME: Final = 128
"""Characters of a session's name: vLLM's own bound."""
_NOT_IN_NAMES: Final = frozenset("@/\\\0")  # vLLM's own rule
_SERVED: Final = ("/tokenize", "/detokenize", "/version")  # beside what is below /v1/
_DECODINGS: Final = 3  # of a path that servers in turn may do; chosen: one more than double
_TOLD: Final = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
_GENERATES: Final = (*_TOLD, "/v1/messages")
# What changes nothing in an engine but its cache; of those that generate, the body decides, too.
_REPEATABLE: Final = frozenset({*_GENERATES, *_SERVED, "/v1/embeddings"})
_CLIENTS_TOOLS: Final = (None, "function", "custom")  # types of tools that the client runs itself
_ACTS: Final = (
    "background", "previous_response_id", "conversation", "mcp_servers", "container",
    "web_search_options",
)  # fmt: skip
"""Fields by which a server goes on after its answer, continues what it keeps, or runs tools."""
_STORES: Final = "/v1/responses"  # keeps its answers unless it is told not to
_KEYS: Final = (b"authorization", b"x-api-key")  # headers: OpenAI's clients', and Anthropic's
_UNNAMED: Final = "~"  # where a named session has its scope, in hexadecimal digits
# Of one connection, not of a request; lengths change with the body, and the host is the engine.
_HOP_BY_HOP: Final = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer "
    b"transfer-encoding upgrade host content-length expect".split()
)


class BadRequestError(Exception):
    """A request that no engine gets; the text says why.

    Args:
        status: Of the answer, in HTTP.
    """

    def __init__(self, why: str, status: int = 400) -> None:
        super().__init__(why)
        self.status = status


class Body:
    """A request's body, kept for as long as it may be sent once more."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self.data

    def release(self) -> None:
        """Forget it: its answer has begun."""
        self.data = b""


class Effect(IntEnum):
    """What a request may have changed where it was sent, beside a cache."""

    NONE = 0
    KEEPS = 1
    """Its answer is kept, if there is one."""
    ACTS = 2
    """Anything: tools have run, or nobody knows what it asks for."""


class Call(NamedTuple):
    """A request as it is sent on.

    Attributes:
        streams: Whether its answer comes token by token.
        effect: Of a request that generates.
    """

    method: str
    path: str
    headers: Headers
    body: Body
    streams: bool = False
    effect: Effect = Effect.NONE

    @property
    def repeatable(self) -> bool:
        """Whether an engine that got it and is gone may be followed by another one."""
        return self.repeatable_if_refused and self.effect is Effect.NONE

    @property
    def repeatable_if_refused(self) -> bool:
        """Whether another engine may be asked what one refused before it began."""
        if self.method == "POST":
            return self.path.partition("?")[0] in _REPEATABLE and self.effect is not Effect.ACTS
        return self.method in ("GET", "HEAD")


class Turn(NamedTuple):
    """What is known of a request with a prompt.

    Attributes:
        session: A name that no other caller's sessions have.
        name: As the engine is told.
        ends: Whether the session does not return after this answer.
    """

    session: str
    name: str
    prompt: Prompt
    ends: bool

    @property
    def is_named(self) -> bool:
        """Whether somebody gave the session its name."""
        return not self.session.startswith(_UNNAMED)


class Asked(NamedTuple):
    """A request, and its turn of a session; None: it generates nothing."""

    call: Call
    turn: Turn | None


def keys_of(headers: Headers) -> list[bytes]:
    """The API keys that a request came with: they say who its caller is."""
    return [value for key, value in headers if key.lower() in _KEYS]


def is_served(path: str) -> bool:
    """Whether requests for a path are passed on to engines."""
    return path.startswith("/v1/") or path in _SERVED


def check_path(path: str) -> None:
    """See to it that a path, without its query, names what its words say.

    Raises:
        BadRequestError: A segment of it, as it is or decoded, leads elsewhere.
    """
    for _ in range(_DECODINGS + 1):
        if {".", ".."} & set(path.replace("\\", "/").split("/")):
            raise BadRequestError("the path has a segment . or .., which is not passed on")
        path = unquote(path)


class Callers:
    """Reads requests, and tells whose session they are; one that names none extends a prompt of its
    session."""

    def __init__(self) -> None:
        self._reader = PromptReader()
        self._last = LastPrompts(self._reader.digest)
        self._inferred = count(1)
        self._names = f"route-{secrets.token_hex(4)}"  # those of another start are not these

    def sent(self, turn: Turn) -> None:
        """Note that a turn's prompt is its session's last one."""
        self._last.note(turn.prompt, turn.session)

    def read(self, method: str, path: str, headers: Headers, body: bytes) -> Asked:
        """What a request asks for.

        Raises:
            BadRequestError: Its session's name cannot be one, or its path leads elsewhere.
        """
        what = path.partition("?")[0]
        check_path(what)
        call = Call(method, _without_slash(path), _passed_on(headers), Body(body))
        what = what.removesuffix("/")
        if method != "POST" or what not in _GENERATES:
            return Asked(call, None)
        fields = _fields(body)
        call = call._replace(effect=_effect(what, fields))
        if fields is None:
            return Asked(call, None)
        try:
            turn = self.turn(fields, headers)
        except orjson.JSONEncodeError:  # it is nested deeper than JSON is written here
            return Asked(call, None)
        if what in _TOLD and not fields.get("session_id"):
            call = call._replace(body=Body(_with_session(body, turn.name)))
        return Asked(call._replace(streams=fields.get("stream") is True), turn)

    def turn(self, fields: Mapping[str, Any], headers: Headers, named: str | None = None) -> Turn:
        """Whose turn a request is, and what it asks about.

        Args:
            named: The session's name, from elsewhere than the request.

        Raises:
            BadRequestError: Its session's name cannot be one.
        """
        scope, hints = _scope(headers, fields), _hints(fields)
        prompt = self._reader.read(fields, scope)
        name = (
            _checked(named, "session")
            or _in_header(headers)
            or _checked(fields.get("session_id"), "session_id")
            or _checked(hints.get("session"), "session")
        )
        session = f"{scope.hex()} {name}" if name else self._last.session(prompt, scope)
        if session is None:
            session = f"{_UNNAMED} {self._names}-{next(self._inferred)}"
        prompt = prompt._replace(pieces=())  # only digests are kept
        return Turn(session, session.partition(" ")[2], prompt, hints.get("session_ended") is True)


def _fields(body: bytes) -> dict[str, Any] | None:
    """The fields of a JSON object; None for anything else, which the engine will judge."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return fields if isinstance(fields, dict) and fields else None


def _effect(path: str, fields: Mapping[str, Any] | None) -> Effect:
    """What a request may change that generates.

    Args:
        fields: None: its body cannot be read here. Engines may read it (NaN, UTF-16).
    """
    if fields is None or any(fields.get(name) not in (None, False) for name in _ACTS):
        return Effect.ACTS
    tools = fields.get("tools") or []
    if not isinstance(tools, list) or not all(map(_is_clients, tools)):
        return Effect.ACTS
    store = fields.get("store")
    keeps = store is not False if path == _STORES else store not in (None, False)
    return Effect.KEEPS if keeps else Effect.NONE


def _is_clients(tool: object) -> bool:
    """Whether a tool is run by the client, and not by the server."""
    return isinstance(tool, dict) and tool.get("type") in _CLIENTS_TOOLS


def _with_session(body: bytes, name: str) -> bytes:
    """Append ``session_id`` to a JSON object that has fields; all other bytes stay as they came."""
    return body.rstrip()[:-1] + b',"session_id":' + orjson.dumps(name) + b"}"


def _in_header(headers: Headers) -> str | None:
    names = [value for key, value in headers if key.lower() == b"x-session-id"]
    if len(names) > 1:
        raise BadRequestError("X-Session-ID is given more than once")
    return _checked(_text(names[0]), "X-Session-ID") if names else None


def _text(value: bytes) -> str:
    """A header's value; clients write UTF-8 as a rule."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _passed_on(headers: Headers) -> Headers:
    """A request's headers without those of one connection, which it may name itself."""
    named = [value for key, value in headers if key.lower() == b"connection"]
    own = _HOP_BY_HOP.union(*(value.lower().replace(b",", b" ").split() for value in named))
    return [(key, value) for key, value in headers if key.lower() not in own]


def _without_slash(path: str) -> str:
    """A path without a slash at its end, of which a server would send its client elsewhere."""
    what, mark, query = path.partition("?")
    return what.removesuffix("/") + mark + query


def _hints(fields: Mapping[str, Any]) -> dict[str, Any]:
    params = fields.get("kv_transfer_params")
    hints = params.get("kvgraph") if isinstance(params, dict) else None
    return hints if isinstance(hints, dict) else {}


def _checked(name: Any, field: str) -> str | None:
    if name is None or name == "":
        return None
    if not isinstance(name, str) or len(name) > MOST_NAME or _NOT_IN_NAMES & set(name):
        raise BadRequestError(
            f"{field} is no name of a session: allowed are 1 to {MOST_NAME} characters without "
            "@ / \\ and NUL"
        )
    return name


def _scope(headers: Headers, fields: Mapping[str, Any]) -> bytes:
    """Whose sessions and prompts these are: the caller's key, the cache's salt, and the model."""
    said = (orjson.dumps(fields.get(name)) for name in ("cache_salt", "model"))
    parts = [*keys_of(headers), *said]
    return hashlib.blake2b(b"\0".join(parts), digest_size=8).digest()
