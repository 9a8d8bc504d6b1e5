"""``Callers``: reads a request: its caller, session and prompt, and whether it may be repeated."""

from __future__ import annotations

import contextlib
import hashlib
import re
import secrets
import threading
from collections.abc import AsyncIterator, Mapping
from enum import IntEnum
from itertools import count
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

import orjson
from cachetools import FIFOCache

from .prompts import LastPrompts, Prompt, PromptReader

Headers = list[tuple[bytes, bytes]]

XARGS: Final = "vllm_xargs"
HINTS: Final = "kvgraph"  # the field with our hints, there and in ``kv_transfer_params``
MOST_BODY: Final = 64 << 20
"""Bytes of a request's body; chosen: several times the longest context in JSON."""
MOST_VALUES: Final = 2 << 20
"""Commas, and so about values, of the longest body that is read here; chosen: twice the longest
context in token ids. All other requests wait while JSON is parsed: a second for 64 MiB of numbers.
"""
MOST_NAME: Final = 128  # characters of a name passed to an engine that did not ask for it; chosen
_LONGEST_KEPT: Final = (
    512  # characters of a session's name; a longer one is replaced by its digest. Chosen
)
_NOT_IN_NAMES: Final = frozenset("@/\\\0")  # by vLLM's rule for cache salts
_NOBODY: Final = re.compile(  # what clients without a name write, or leave of a template
    r"null|none|nil|undefined|unknown|anonymous|nan|n/a|0{8}-[-0]{27}|\[object .*|(\{\{|\$\{).*",
    re.IGNORECASE | re.DOTALL,
)
_UUID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
# Paths served besides those below /v1/. At others, such as /pooling, vLLM asks for no API key.
_SERVED: Final = ("/tokenize", "/detokenize", "/version", "/v2/rerank", "/v2/embed")
_DECODINGS: Final = 3  # of a path by servers in turn; chosen: one more than double decoding
_GENERATES: Final = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
# Requests that change nothing in an engine but its cache; for generating ones, the body counts too.
_REPEATABLE: Final = frozenset({
    *_GENERATES, *_SERVED, "/v1/embeddings", "/v1/score", "/v1/rerank", "/v1/messages/count_tokens",
    "/v1/audio/transcriptions", "/v1/audio/translations",
})  # fmt: skip
_CLIENTS_TOOLS: Final = (None, "function", "custom")  # types of tools that the client runs itself
_ACTS: Final = (
    "background", "previous_response_id", "conversation", "mcp_servers", "container",
    "web_search_options",
)  # fmt: skip
"""Fields that make a server continue after its answer, continue stored responses, or run tools."""
_STORES: Final = "/v1/responses"  # answers here are stored unless the request says otherwise
_SESSION: Final = b"x-session-id"  # vLLM reads it in all of its APIs
_FINAL: Final = b"x-dynamo-session-final"  # "true" on a session's last request
_MARK: Final = b"\xef\xbb\xbf"  # UTF-8's byte order mark, which PowerShell and .NET write
HARNESSES: Final[dict[str, tuple[str, ...]]] = {
    "Dynamo": ("x-dynamo-session-id",),  # it has precedence over harnesses' own
    "Claude Code": ("X-Claude-Code-Session-Id",),
    # A thread is one agent's; subagents have their session's id.
    "Codex": ("thread-id", "thread_id", "session-id", "session_id", "conversation_id"),
    "opencode": ("x-opencode-session", "x-session-affinity"),
    "Goose": ("agent-session-id",),
    "Kilo Code": ("X-KiloCode-TaskId", "x-kilo-session"),
    "Qwen Code": ("X-Qwen-Code-Session-Id",),
    "Amp": ("X-Amp-Thread-Id",),
    "Hermes": ("X-Hermes-Session-Id",),
    "Mistral Vibe, Zed": ("x-affinity",),
    "Open WebUI": ("X-OpenWebUI-Chat-Id",),
    "Hugging Face's chat-ui": ("ChatUI-Conversation-ID",),
    "LiteLLM": ("X-Litellm-Session-Id",),
    "Helicone": ("Helicone-Session-Id",),
    "xAI's clients": ("x-grok-conv-id",),
    "others": ("X-Thread-Id", "X-Conversation-Id", "conversation-id", "x-multi-turn-session-id"),
}
"""Headers in which agent harnesses name their sessions; the first one present counts."""
_AGENT: Final = b"x-claude-code-agent-id"
"""Claude Code's subagents have their session's name, and this; each is a conversation."""
_HEADERS: Final = {
    header.lower().encode(): header for headers in HARNESSES.values() for header in headers
}
FIELDS: Final[tuple[tuple[str, ...], ...]] = (
    ("metadata", "session_id"), ("metadata", "conversation_id"), ("metadata", "thread_id"),
    ("metadata", "chat_id"), ("metadata", "sessionId"), ("client_metadata", "session_id"),
    ("litellm_session_id",), ("conversation",), ("conversation", "id"), ("vllm_xargs", "job_id"),
    ("nvext", "agent_context", "trajectory_id"), ("nvext", "agent_context", "session_id"),
    ("kv_transfer_params", "evoke", "evoke_session"),
)  # fmt: skip
"""Fields of bodies in which they do so; the first one present counts."""
_USERS: Final = (("metadata", "user_id"), ("user",))
"""Claude Code's contains a session; LiteLLM derives the second from the first."""
_IN_USER: Final = re.compile(r"_session_([0-9A-Za-z-]+)$")
_CACHE_KEY: Final = ("prompt_cache_key",)
"""Names a session with Codex and opencode, but a whole application elsewhere."""
_MOST_CHATS: Final = 16
"""Chats with different beginnings under one cache key above which the key names no session. Chosen:
subagents share their session's key.
"""
_MOST_KEPT: Final = 100_000  # cache keys, and stored responses, that are remembered; chosen
_LONGEST_HEAD: Final = 64 << 10  # bytes of an answer searched for a response's id; chosen
_RESPONSE: Final = re.compile(rb'"id"\s*:\s*"(resp_[\w-]{1,128})"')
_KEYS: Final = (b"authorization", b"x-api-key")  # headers of OpenAI's and Anthropic's clients
_UNNAMED: Final = "~"  # replaces the scope, hexadecimal digits in names of named sessions
# They belong to one connection; lengths change with the body, and the host is the engine's.
_HOP_BY_HOP: Final = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer "
    b"transfer-encoding upgrade host content-length expect".split()
)


class BadRequestError(Exception):
    """A request that is not sent to any engine; the text gives the reason."""

    def __init__(self, why: str, status: int = 400) -> None:
        super().__init__(why)
        self.status = status


class Body:
    """A request's body, kept as long as the request may be sent again."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self.data

    def release(self) -> None:
        self.data = b""


class SideEffect(IntEnum):
    """What a generating request may have changed on its engine, besides the KV cache."""

    NONE = 0
    KEEPS = 1  # its answer, if any, is stored
    ACTS = 2  # it may have changed something: tools ran, or the request is unreadable


class Turn(NamedTuple):
    """A request with a prompt, and its session."""

    session: str  # unique over all callers
    name: str  # the caller's name for the session, or a generated one
    prompt: Prompt
    ends: bool  # whether the session ends with this answer
    # The name sent to the engine; empty: none is sent, and the engine infers its own sessions.
    engine_name: str = ""

    @property
    def is_named(self) -> bool:
        """Whether the caller named the session; otherwise it was inferred."""
        return not self.session.startswith(_UNNAMED)


class Call(NamedTuple):
    method: str
    path: str
    headers: Headers
    body: Body
    streams: bool = False  # whether the answer comes token by token
    effect: SideEffect = SideEffect.NONE  # of a request that generates
    turn: Turn | None = None  # of its session; None: it generates nothing

    @property
    def repeatable(self) -> bool:
        """Whether another engine may get the request after one that received it went away."""
        return self.repeatable_if_refused and self.effect is SideEffect.NONE

    @property
    def repeatable_if_refused(self) -> bool:
        """Whether another engine may get the request after one refused it unstarted."""
        if self.method == "POST":
            return self.path.partition("?")[0] in _REPEATABLE and self.effect is not SideEffect.ACTS
        return self.method in ("GET", "HEAD")


def keys_of(headers: Headers) -> list[bytes]:
    """Return the API keys in a request's headers, which identify its caller."""
    return [value for key, value in headers if key.lower() in _KEYS]


def is_served(path: str) -> bool:
    """Return whether requests for a path are sent to engines."""
    return (path.startswith("/v1/") and path != "/v1/") or path in _SERVED


def check_path(path: str) -> None:
    """Refuse a path that is not served, or has ``.`` or ``..``, encoded or not, as a segment."""
    path = path.partition("?")[0]
    if not is_served(path):
        raise BadRequestError("the path leads elsewhere than to /v1/…")
    for _ in range(_DECODINGS + 1):
        if {".", ".."} & set(path.replace("\\", "/").split("/")):
            raise BadRequestError("the path has a segment . or .., which is not passed on")
        path = unquote(path)


class _Name(NamedTuple):
    name: str
    engine_name: str  # name known to engines; empty: they get none
    shared: bool = False  # whether several sessions may have it

    def accepted(self) -> _Name:
        """Return the name as one that an engine is told only if it surely takes it."""
        name = self.engine_name
        fits = len(name) <= MOST_NAME and name.isascii() and name.isprintable()
        return self if fits and not _NOT_IN_NAMES & set(name) else self._replace(engine_name="")


class Callers:
    """Reads requests and finds their sessions. Safe to use from several threads. With
    ``harnesses``, session names given by known agent harnesses count; one such name may stand for
    several chats at a time.
    """

    def __init__(self, harnesses: bool = True) -> None:
        self._harnesses = harnesses
        self._reader = PromptReader()
        self._last = LastPrompts(self._reader.digest)
        self._inferred = count(1)
        self._names = f"route-{secrets.token_hex(4)}"  # differs from those of another start
        self._lock = threading.Lock()
        self._chats: FIFOCache[str, set[bytes]] = FIFOCache(_MOST_KEPT)  # by cache key
        self._responses: FIFOCache[tuple[bytes, str], str] = FIFOCache(
            _MOST_KEPT
        )  # by scope and response id

    def sent(self, turn: Turn) -> None:
        """Remember a turn's prompt as its session's last one."""
        self._last.note(turn.prompt, turn.session)

    def answered(self, turn: Turn, first: bytes) -> None:
        """Remember the id of a turn's response, so that the next turn can continue it."""
        if found := _RESPONSE.search(first, 0, _LONGEST_HEAD):
            with self._lock:
                self._responses[turn.prompt.scope, found[1].decode()] = turn.session

    def read(self, method: str, path: str, headers: Headers, body: bytes) -> Call:
        """Parse a request; raises BadRequestError."""
        what = path.partition("?")[0]
        check_path(what)
        call = Call(method, _without_slash(path), _passed_on(headers), Body(body))
        what = what.removesuffix("/")
        if method != "POST" or what not in _GENERATES:
            return call
        if body.startswith(_MARK):
            body = body.removeprefix(_MARK)
            call = call._replace(body=Body(body))
        fields = _fields(body)
        call = call._replace(effect=_effect(what, fields))
        if fields is None:
            return call
        try:
            turn = self.turn(fields, headers)
        except (orjson.JSONEncodeError, RecursionError):  # it is nested deeper than is read here
            return call
        call = call._replace(turn=turn, streams=fields.get("stream") is True)
        if turn.engine_name and _explicit(fields, headers) is None:  # a field might be refused
            others = [each for each in call.headers if each[0].lower() != _SESSION]
            call = call._replace(headers=[*others, (_SESSION, turn.engine_name.encode())])
        return call

    def turn(self, fields: Mapping[str, Any], headers: Headers, named: str | None = None) -> Turn:
        """Find a request's session and read its prompt."""
        scope, hints = _scope(headers, fields), hints_in(fields)
        prompt = self._reader.read(fields, scope)
        session, engine_name = self._session(prompt, fields, headers, _name(named))
        name = session.partition(" ")[2]
        ends = hints.get("session_ended") is True or (self._harnesses and _is_last(fields, headers))
        return Turn(session, name, prompt.known_by, ends, engine_name)

    def _session(
        self, prompt: Prompt, fields: Mapping[str, Any], headers: Headers, named: _Name | None
    ) -> tuple[str, str]:
        scope = prompt.scope
        found = named or _explicit(fields, headers)
        if found is None and self._harnesses:
            found = _harness(fields, headers)
        if found is not None:
            # Nobody else has a UUID, and API keys expire in the middle of a session.
            by_name = self._harnesses and _UUID.search(found.name)
            owner = _scope([], fields) if by_name else scope
            session = f"{owner.hex()} {found.name}"
            if not (found.shared and self._is_applications(session, prompt)):
                return session, found.engine_name
        before = fields.get("previous_response_id")
        if isinstance(before, str):
            with self._lock:
                session_before = self._responses.get((scope, before))
            if session_before is not None:
                return session_before, ""
        inferred = self._last.session(prompt, scope)
        return inferred or f"{_UNNAMED} {self._names}-{next(self._inferred)}", ""

    def _is_applications(self, session: str, prompt: Prompt) -> bool:
        """Tell whether a cache key is shared by many chats."""
        if not prompt.said:
            return False
        with self._lock:
            begun = self._chats.get(session, set())
            if len(begun) <= _MOST_CHATS:
                begun.add(prompt.said[0].digest)
            self._chats[session] = begun
            return len(begun) > _MOST_CHATS


def _explicit(fields: Mapping[str, Any], headers: Headers) -> _Name | None:
    """Return the session's name by vLLM's precedence. No name is refused: no engine does that."""
    in_header, xargs = _in_header(headers), fields.get(XARGS)
    return (
        _name(fields.get("session_id"))
        or in_header
        or (_name(xargs.get("session_id")) if isinstance(xargs, dict) else None)
        or _name(hints_in(fields).get("session"))
    )


def _harness(fields: Mapping[str, Any], headers: Headers) -> _Name | None:
    """Return the session's name as an agent harness gives it, if any."""
    known = {key.lower(): text_of(value).strip() for key, value in reversed(headers)}
    agent = known.get(_AGENT)
    said = (
        *(known.get(header, "") for header in _HEADERS),
        *(_field(fields, path) for path in FIELDS),
        *(_in_user(_field(fields, path)) for path in _USERS),
    )
    for each in said:
        if name := _name(each):
            own = _name(f"{each}:{agent}") if agent else name
            return (own or name).accepted()
    key = _name(_field(fields, _CACHE_KEY))
    return key.accepted()._replace(shared=True) if key else None


def _is_last(fields: Mapping[str, Any], headers: Headers) -> bool:
    """Tell whether Dynamo's clients or Continuum's say that their session ends."""
    xargs = fields.get(XARGS)
    said = [xargs.get("is_last_step")] if isinstance(xargs, dict) else []
    said += [text_of(value) for key, value in headers if key.lower() == _FINAL]
    return any(str(each).lower() in ("true", "1") for each in said)


def _name(name: object) -> _Name | None:
    if not isinstance(name, str) or not name or _NOBODY.fullmatch(name):
        return None
    if len(name) > _LONGEST_KEPT:  # names are remembered, and one may be as long as a body
        return _Name(hashlib.blake2b(name.encode(), digest_size=16).hexdigest(), "")
    return _Name(name, name)


def _field(fields: Mapping[str, Any], path: tuple[str, ...]) -> str:
    value: Any = fields
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value.strip() if isinstance(value, str) else ""


def _in_user(user: str) -> str:
    """Return the session in a user id as Claude Code writes it; empty where there is none."""
    if user.startswith("{"):
        try:
            return _field(orjson.loads(user), ("session_id",))
        except orjson.JSONDecodeError:
            return ""
    found = _IN_USER.search(user)
    return found[1] if found else ""


def _fields(body: bytes) -> dict[str, Any] | None:
    """Return a JSON object's fields; None for anything else, which the engine will judge."""
    if body.count(b",") > MOST_VALUES:
        return None
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return fields if isinstance(fields, dict) and fields else None


def _effect(path: str, fields: Mapping[str, Any] | None) -> SideEffect:
    """Tell what a generating request may change on its engine."""
    if fields is None or any(  # engines may read a body that we cannot (NaN, UTF-16)
        fields.get(name) not in (None, False) for name in _ACTS
    ):
        return SideEffect.ACTS
    tools = fields.get("tools") or []
    if not isinstance(tools, list) or not all(map(_is_clients, tools)):
        return SideEffect.ACTS
    if path == _STORES and fields.get("prompt") is not None:  # kept at the server, tools and all
        return SideEffect.ACTS
    store = fields.get("store")
    keeps = store is not False if path == _STORES else store not in (None, False)
    return SideEffect.KEEPS if keeps else SideEffect.NONE


def _is_clients(tool: object) -> bool:
    """Tell whether a tool is run by the client, not by the server."""
    return isinstance(tool, dict) and tool.get("type") in _CLIENTS_TOOLS


def _in_header(headers: Headers) -> _Name | None:
    first = next((value for key, value in headers if key.lower() == _SESSION), b"")
    name = _name(text_of(first))  # as servers read headers: the first one counts, in Latin-1
    return name._replace(engine_name=name.engine_name and first.decode("latin-1")) if name else None


def text_of(value: bytes) -> str:
    """Return a header's text, which may be UTF-8 or Latin-1."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _passed_on(headers: Headers) -> Headers:
    """Return headers without those of one connection."""
    named = [value for key, value in headers if key.lower() == b"connection"]
    own = _HOP_BY_HOP.union(*(value.lower().replace(b",", b" ").split() for value in named))
    return [(key, value) for key, value in headers if key.lower() not in own]


def _without_slash(path: str) -> str:
    """Drop a path's last slash: a server would redirect the client past the proxy."""
    what, mark, query = path.partition("?")
    return what.removesuffix("/") + mark + query


def hints_in(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hints in a request's fields, wherever an engine looks for them."""
    return _stated(fields.get(XARGS)) | _stated(fields.get("kv_transfer_params"))


def _stated(params: object) -> dict[str, Any]:
    """Return a field's hints, which may be JSON text there."""
    hints = params.get(HINTS) if isinstance(params, dict) else None
    if isinstance(hints, str):
        with contextlib.suppress(orjson.JSONDecodeError):
            hints = orjson.loads(hints)
    return hints if isinstance(hints, dict) else {}


def _scope(headers: Headers, fields: Mapping[str, Any]) -> bytes:
    """Return a digest of caller, cache salt and model: equal prompts of other scopes differ."""
    said = (orjson.dumps(fields.get(name)) for name in ("cache_salt", "model"))
    parts = [*keys_of(headers), *said]
    return hashlib.blake2b(b"\0".join(parts), digest_size=8).digest()
