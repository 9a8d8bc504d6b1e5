"""``PromptReader`` digests prompts; ``LastPrompts`` finds the session that one continues."""

from __future__ import annotations

import hashlib
import re
import secrets
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Any, Final, NamedTuple

import orjson
from cachetools import FIFOCache

from .pools import MOST_LINKS_HELD, PromptPrefix

MOST_LINKS: Final = 2048  # links of one prompt; a longer one is identified by its beginning; chosen
PIECE: Final = 1024  # characters of a prompt without messages per link; chosen
PIECE_TOKENS: Final = 256  # tokens per link of a prompt given as token ids; chosen
CHARACTERS_PER_TOKEN: Final = 4
"""For English text, by OpenAI's rule of thumb; costs, and how much fits a pool, depend on it."""
BINARY_TOKENS: Final = 1024
"""Tokens assumed for an image, a sound or a file; chosen: about a large image of Qwen2-VL."""
_BINARY: Final = frozenset(
    {"image", "image_url", "input_image", "audio_url", "input_audio", "video_url", "file"}
    | {"input_file", "document", "computer_screenshot"}
)
_LEADING: Final = ("tools", "system", "instructions")  # templates write them before the messages
_SYSTEM: Final = frozenset({"system", "developer"})  # roles; prompts of these alone are shared
_MODELS: Final = frozenset({"assistant", "model"})  # roles; what they say is unique to one chat
_TEXT: Final = frozenset({"text", "input_text", "output_text", "refusal"})
_THOUGHTS: Final = frozenset({"thinking", "redacted_thinking", "reasoning"})
"""Types of parts and items that clients and templates omit from later prompts."""
_ADDRESS: Final = re.compile(r'"https?://[^"]*"')
_SIGNATURE: Final = re.compile(r"\b(?:signature|sig)=", re.IGNORECASE)
_CALLS: Final = frozenset({"tool_calls", "function_call"})
_BILLING: Final = "x-anthropic-billing-header"  # a line that differs each time; vLLM drops it, too
_SAYS_NOTHING: Final = frozenset(
    {"cache_control", "id", "call_id", "tool_call_id", "tool_use_id", "status", "annotations"}
)  # fields of parts and items that are about them
NEAREST: Final = 8
"""Messages before the last one that may have been the last one of the previous prompt; chosen."""
_MOST_WORDS: Final = 128  # words kept of a text, by smallest digest: a fair sample. Chosen
_EXCERPT: Final = 1024  # characters at either end of a text whose words count; chosen
_WORD: Final = re.compile(r"[!-~]+|\S")  # some scripts do not separate words by spaces

Words = frozenset[int]  # hashes of pairs of neighbouring words


class PromptEnd(NamedTuple):
    after: bytes  # digest of its last link, or of its scope
    size: int  # characters or token ids after that link; 0: none
    digest: bytes  # digest of the whole prompt


class MessageDigest(NamedTuple):
    """Digests of a chat message, or of a piece of a prompt that is not a chat."""

    digest: bytes  # digest of the message alone, since the text before it may change
    chain: bytes  # digest of all messages up to here, without the system prompt
    tokens: int  # estimated
    by_model: bool  # whether a model wrote it


class Prompt(NamedTuple):
    links: list[PromptPrefix]
    tokens: int  # estimated
    # None if longer prompts do not continue it: a batch, a system prompt alone, or a chat.
    end: PromptEnd | None = None
    pieces: Sequence[Any] = ()  # all of a prompt without messages, in order; must not be kept
    # Its messages without the leading system prompt, or its pieces.
    said: Sequence[MessageDigest] = ()
    texts: Sequence[str] = ()  # texts of the last messages; must not be kept
    # Digest of the last message without what stands behind its first empty line; empty if it has
    # none.
    head: bytes = b""
    newest: Words = frozenset()  # words of the last message; empty if there are none
    system: Words = frozenset()  # words of the system prompt
    scope: bytes = b""  # digest of caller, salt and model

    @property
    def known_by(self) -> Prompt:
        """Return a copy that may be kept, with digests and without texts."""
        return self._replace(pieces=(), texts=())


class PromptReader:
    """Turns prompts into chains of keyed digests, so that two prompts cannot be made to look equal.

    Everything that a chat template does not show is ignored: ids, cache marks, the order of keys,
    reasoning of earlier turns, surrounding white space.
    """

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def read(self, body: Mapping[str, Any], scope: bytes) -> Prompt:
        """Read the prompt of a completion, a chat or a response; without one, the result has no
        links. ``scope`` is a digest of the prompt's owner: equal prompts of other scopes differ.
        """
        messages = body.get("messages", body.get("input"))
        if isinstance(messages, list):
            return self._chat(body, messages, scope)
        pieces, whole = _pieces(body)
        links: list[PromptPrefix] = []
        digest, tokens = scope, 0
        for piece in pieces[:MOST_LINKS]:
            data = _data(piece)
            tokens += _tokens_of(piece, data)
            if len(links) < whole:
                digest = self._digest(digest, data)
                links.append(PromptPrefix(digest, tokens))
        tokens = _with_rest(tokens, len(pieces))
        end = self._end(digest, pieces, whole)
        begins = [0, *(link.tokens for link in links)]
        said = [
            MessageDigest(link.key, link.key, link.tokens - begin, False)
            for begin, link in zip(begins, links, strict=False)
            if isinstance(link.key, bytes)
        ]
        return Prompt(links, tokens, end, pieces, said, scope=scope)

    def digest(self, before: bytes, piece: Any) -> bytes:
        return self._digest(before, _data(piece))

    def _chat(self, body: Mapping[str, Any], messages: list[Any], scope: bytes) -> Prompt:
        leading = [_leading(name, body[name]) for name in _LEADING if body.get(name)]
        shown = [each for message in messages if (each := _shown(message)) is not None]
        links: list[PromptPrefix] = []
        said, texts = list[MessageDigest](), deque[str](maxlen=NEAREST + 1)
        digest = chain = scope
        tokens, system = 0, list[str]()
        for each in [*leading, *shown][:MOST_LINKS]:
            tokens += each.tokens
            own = self._digest(scope, each.data)
            digest = self._digest(digest, own)
            links.append(PromptPrefix(digest, tokens))
            if each.role in _SYSTEM and not said:
                system.append(each.text)
                continue
            chain = self._digest(chain, own)
            said.append(MessageDigest(own, chain, each.tokens, each.role in _MODELS))
            texts.append(each.text)
        tokens = _with_rest(tokens, len(leading) + len(shown))
        newest = sample_of(words_of(texts[-1])) if said else frozenset[int]()
        words = sample_of(words_of("\n".join(system)))
        asked, cut, _ = texts[-1].partition("\n\n") if said else ("", "", "")
        data = _prompt_text(shown[-1].role, asked.strip()).data if cut else b""
        head = self._digest(scope, data) if data else b""
        return Prompt(links, tokens, None, (), said, texts, head, newest, words, scope)

    def _digest(self, before: bytes, data: bytes) -> bytes:
        return hashlib.blake2b(before + data, key=self._key, digest_size=16).digest()

    def _end(self, digest: bytes, pieces: Sequence[Any], whole: int) -> PromptEnd | None:
        if not pieces or len(pieces) > whole + 1:
            return None
        if len(pieces) == whole or whole >= MOST_LINKS:
            return PromptEnd(digest, 0, digest)
        return PromptEnd(digest, len(pieces[-1]), self.digest(digest, pieces[-1]))


def words_of(text: str) -> Words:
    """Return a text's words, each hashed with the one before; of a long text, its two ends'."""
    if len(text) > 2 * _EXCERPT:
        text = f"{text[:_EXCERPT]} {text[-_EXCERPT:]}"
    words = _WORD.findall(text)
    return frozenset(map(hash, zip(["", *words], words, strict=False)))


def sample_of(words: Words) -> Words:
    return words if len(words) <= _MOST_WORDS else frozenset(sorted(words)[:_MOST_WORDS])


class _Shown(NamedTuple):
    """A message, a system prompt or tools, as chat templates show it."""

    role: str
    text: str
    data: bytes
    tokens: int


def _shown(message: Any) -> _Shown | None:
    """Normalise a message or an item of a response; None if a template shows nothing of it."""
    if not isinstance(message, dict):
        return _made("", [_plain(message)])
    kind = message.get("type")
    if kind in _THOUGHTS:
        return None
    role = message.get("role")
    if kind in ("function_call", "custom_tool_call"):
        said = message.get("arguments", message.get("input"))
        return _made("assistant", [_call(message.get("name"), said)])
    if isinstance(kind, str) and kind.endswith("_call_output"):
        return _made("tool", _texts(message.get("output")))
    if not isinstance(role, str):
        return _made("", [_plain(_without_marks(message))])
    content = message.get("content")
    if isinstance(content, str) and role not in _SYSTEM and not _CALLS & message.keys():
        return _prompt_text(role, content.strip())  # most are like that
    parts = _texts(content)
    if role in _SYSTEM:
        parts = _without_billing(parts)
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        called = function if isinstance(function, dict) else {}
        parts.append(_call(called.get("name"), called.get("arguments")) if called else _plain(call))
    if isinstance(function := message.get("function_call"), dict):
        parts.append(_call(function.get("name"), function.get("arguments")))
    return _made(role, parts) if parts or role not in _MODELS | _SYSTEM else None


def _leading(name: str, value: Any) -> _Shown:
    if name == "tools":
        tools = list(map(_without_marks, value)) if isinstance(value, list) else value
        return _made("system", [_plain(tools)])
    return _made("system", _without_billing(_texts(value)))


class _Binary(str):
    __slots__ = ()


def _prompt_text(role: str, text: str) -> _Shown:
    data = f"{role}\0{text}".encode(errors="surrogatepass")
    return _Shown(role, text, data, 1 - (-len(text) // CHARACTERS_PER_TOKEN))


def _made(role: str, parts: Sequence[str]) -> _Shown:
    said = "\n".join(
        filter(None, (part.strip() for part in parts if not isinstance(part, _Binary)))
    )
    shown = _prompt_text(role, said)
    if binary := [part for part in parts if isinstance(part, _Binary)]:
        data = "\0".join(["", *binary]).encode(errors="surrogatepass")
        tokens = shown.tokens + len(binary) * BINARY_TOKENS
        shown = shown._replace(data=shown.data + data, tokens=tokens)
    return shown


def _texts(content: Any) -> list[str]:
    if isinstance(content, str):
        return [content] if content else []
    if isinstance(content, dict):
        content = [content]
    if not isinstance(content, list):
        return [] if content is None else [_plain(content)]
    found: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(part, str):
            found.append(part)
        elif kind in _THOUGHTS:
            continue
        elif kind in _TEXT and isinstance(text := part.get("text", part.get("refusal")), str):
            found.append(text)
        elif kind == "tool_use":
            found.append(_call(part.get("name"), part.get("input")))
        elif kind == "tool_result":
            found += _texts(part.get("content"))
        elif kind in _BINARY:
            found.append(_Binary(_ADDRESS.sub(_unsigned, _plain(_without_marks(part)))))
        else:
            found.append(_plain(_without_marks(part)))
    return found


def _unsigned(address: re.Match[str]) -> str:
    """Drop the query of an address that an object store signs anew for each prompt."""
    where, _, query = address[0].partition("?")
    return where if _SIGNATURE.search(query) else address[0]


def _call(name: Any, arguments: Any) -> str:
    """Write a tool call as text; arguments that are JSON in a string are normalised."""
    if isinstance(arguments, str):
        try:
            arguments = orjson.loads(arguments)
        except orjson.JSONDecodeError:
            return f"{name} {arguments}"
    return f"{name} {_plain(arguments)}"


def _plain(value: Any) -> str:
    options = orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS
    return orjson.dumps(value, option=options).decode()


def _without_marks(part: Any) -> Any:
    """Drop fields that templates do not show."""
    if not isinstance(part, dict):
        return part
    return {name: each for name, each in part.items() if name not in _SAYS_NOTHING}


def _without_billing(parts: Iterable[str]) -> list[str]:
    found = [
        part.partition("\n")[2] if part.lstrip().startswith(_BILLING) else part for part in parts
    ]
    return [part for part in found if part]


def _pieces(body: Mapping[str, Any]) -> tuple[Sequence[Any], int]:
    """Return the pieces of a prompt without messages, and how many of them are whole."""
    leading = [_leading(name, body[name]).data for name in _LEADING if body.get(name)]
    prompt = body.get("prompt", body.get("messages", body.get("input")))
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        return prompt, 0  # no prompt extends a batch
    size, text = PIECE_TOKENS, prompt
    if isinstance(prompt, str):
        size, text = PIECE, prompt.encode(errors="surrogatepass")
    if not isinstance(text, bytes | list):
        return leading, 0
    cut = [text[at : at + size] for at in range(0, len(text), size)]
    return [*leading, *cut], len(leading) + len(text) // size


def _with_rest(tokens: int, pieces: int) -> int:
    """Extrapolate the tokens of a prompt longer than ``MOST_LINKS`` pieces."""
    beyond = max(0, pieces - MOST_LINKS)
    return tokens + tokens * beyond // MOST_LINKS


def _tokens_of(piece: Any, data: bytes) -> int:
    if isinstance(piece, list) and piece and isinstance(piece[0], int):
        return len(piece)
    return -(-len(data) // CHARACTERS_PER_TOKEN)


def _data(piece: Any) -> bytes:
    return piece if isinstance(piece, bytes) else orjson.dumps(piece)


_MOST_TAILS: Final = 64  # prompts known to end after one link, or to contain one word; chosen
_MOST_KNOWN: Final = 50_000  # sessions whose last prompt's words are remembered: 150 MB. Chosen
_FOUND_BY: Final = 4  # words of a message by which it is found again; chosen
_LEAST_WORDS: Final = 8  # words of a system prompt needed to tell two apart; chosen
_KEPT: Final = 0.5  # of a last prompt; one that keeps more continues it, as in the sidecar

Digest = Callable[[bytes, Any], bytes]  # digest of a piece, given that of what precedes it


class _MessageOwner(NamedTuple):
    """The session whose message it is; None: several sessions'."""

    session: str | None
    first: bool = True  # whether it was in the session's first prompt


class _LastPrompt(NamedTuple):
    at: int  # order in which it was noted
    # ``messages``, ``tokens``: those of the prompt, without the system prompt.
    messages: int
    tokens: int
    # ``newest``, ``newest_tokens``, ``digest``: those of its last message.
    newest: Words
    newest_tokens: int
    digest: bytes
    system: Words
    found_by: tuple[tuple[bytes, int], ...]


class LastPrompts:
    """Finds the session that a prompt without a session name continues. Thread-safe.

    A prompt continues a session if it begins with the whole of one of its prompts. Otherwise it
    must keep more than half of the session's last prompt, including something that no other session
    has, and contain an answer to it. Prompts that only begin alike, such as those with the same
    examples, continue nothing.
    """

    def __init__(self, digest: Digest, most: int = MOST_LINKS_HELD) -> None:
        self._digest, self._most = digest, most
        self._lock = threading.Lock()
        self._sessions: OrderedDict[PromptEnd, str] = OrderedDict()  # of prompts without messages
        self._ends: dict[bytes, OrderedDict[PromptEnd, None]] = {}  # by what they are behind
        self._chats: FIFOCache[bytes, str] = FIFOCache(most)  # by all that was said
        self._owners: dict[bytes, _MessageOwner] = {}  # by what was said
        self._known: OrderedDict[str, _LastPrompt] = OrderedDict()
        self._by_word: dict[tuple[bytes, int], OrderedDict[str, None]] = {}
        self._noted = 0

    def session(self, prompt: Prompt, scope: bytes) -> str | None:
        with self._lock:
            if prompt.pieces:
                exact = self._continued_text(prompt, scope)
            else:
                exact = self._continued_chat(prompt)
            return exact or self._likeliest(prompt)

    def note(self, prompt: Prompt, session: str) -> None:
        with self._lock:
            if prompt.end is not None:
                self._note_end(prompt.end, session)
            elif prompt.said:
                self._chats[prompt.said[-1].chain] = session
            if prompt.said:
                self._note_said(prompt, session)

    def _continued_text(self, prompt: Prompt, scope: bytes) -> str | None:
        """Return the session whose whole prompt, without messages, this one extends."""
        keys: list[Any] = [scope, *(link.key for link in prompt.links)]
        for at in range(min(len(keys), len(prompt.pieces)) - 1, -1, -1):
            before, piece = keys[at], prompt.pieces[at]
            for end in reversed(self._ends.get(before, ())):
                if not end.size or (
                    isinstance(piece, bytes | list)
                    and len(piece) > end.size
                    and self._digest(before, piece[: end.size]) == end.digest
                ):
                    return self._sessions[end]
        return None

    def _continued_chat(self, prompt: Prompt) -> str | None:
        said = prompt.said
        until = len(said) if len(prompt.links) == MOST_LINKS else len(said) - 1
        for at in range(until - 1, -1, -1):
            if (session := self._chats.get(said[at].chain)) is None:
                continue
            known = self._known.get(session)
            # Users alone may have said the same under another system prompt.
            answered = any(each.by_model for each in said[: at + 1])
            if answered or known is None or _alike(known.system, prompt.system):
                return session
        return None

    def _likeliest(self, prompt: Prompt) -> str | None:
        """Return the session of whose last prompt this one keeps most, and more than half."""
        said, kept, beyond = prompt.said, Counter[str](), set[str]()
        messages, shared = Counter[str](), 0  # of those that are kept, each session's own
        answered, again = set[str](), dict[str, float]()
        replied = set[str]()  # sessions of which a message has an answer that is new
        digests = {each.digest for each in said[:-1]}
        seen = set[bytes]()  # what is said again and again counts once
        for each, behind in pairwise(said):
            session, first = self._owners.get(each.digest, _MessageOwner(None))
            once = each.digest not in seen
            seen.add(each.digest)
            if session is None:
                shared += once and each.digest in self._owners
                continue
            kept[session] += once * each.tokens
            messages[session] += once
            if behind.by_model and behind.digest not in self._owners:
                replied.add(session)
            if not first:
                beyond.add(session)
            if each.by_model:
                answered.add(session)
        for session, share in self._asked_again(prompt):
            again[session] = max(share, again.get(session, 0.0))
        best, most = None, (0.0, 0)  # the session, and what is kept of it
        for session in kept.keys() | again.keys():
            if (known := self._known.get(session)) is None:
                continue
            # Whole, it is among what is kept.
            share = 0.0 if known.digest in digests else again.get(session, 0.0)
            # What a harness puts behind each prompt, such as a reminder, may be gone.
            grew = len(said) > known.messages and (
                said[known.messages].by_model or session in replied
            )
            goes_on = known.digest in digests or share > _KEPT or session in beyond or grew
            own = session in answered or session in beyond  # whatever the system's words are
            alike = own or _alike(known.system, prompt.system)
            tokens = kept[session] + share * known.newest_tokens
            # A few large messages, such as files, may change and be most of the text.
            by_number = session in replied and messages[session] + shared >= _KEPT * len(said)
            keeps = tokens > _KEPT * known.tokens or by_number
            if goes_on and alike and keeps:
                # Of chats that begin alike, the one that was asked first goes on first.
                best, most = max((best, most), (session, (tokens, -known.at)), key=itemgetter(1))
        return best

    def _asked_again(self, prompt: Prompt) -> Iterator[tuple[str, float]]:
        """Yield sessions whose newest message is in this prompt, before its end; and its share."""
        last = len(prompt.said) - 1
        for each, text in zip(
            prompt.said[max(0, last - NEAREST) : last], prompt.texts, strict=False
        ):
            if each.by_model:
                continue
            words = words_of(text)
            found = {
                session: None
                for word in sorted(words)[: 2 * _FOUND_BY]
                for session in self._by_word.get((prompt.scope, word), ())
            }
            for session in found:
                newest = self._known[session].newest
                yield session, len(newest & words) / len(newest)

    def _note_said(self, prompt: Prompt, session: str) -> None:
        said, before = prompt.said, self._known.pop(session, None)
        owner = _MessageOwner(session, before is None)
        for digest in (*(each.digest for each in said), *([prompt.head] if prompt.head else ())):
            theirs = self._owners.setdefault(digest, owner)
            if theirs.session not in (session, None):
                self._owners[digest] = _MessageOwner(None)
        while len(self._owners) > self._most:
            del self._owners[next(iter(self._owners))]
        if before is not None:
            self._forget_words(session, before)
        found_by = tuple((prompt.scope, word) for word in sorted(prompt.newest)[:_FOUND_BY])
        self._noted += 1
        last, tokens = said[-1], sum({each.digest: each.tokens for each in said}.values())
        self._known[session] = _LastPrompt(
            self._noted, len(said), tokens, prompt.newest, last.tokens, last.digest, prompt.system,
            found_by,
        )  # fmt: skip
        for word in found_by:
            sessions = self._by_word.setdefault(word, OrderedDict())
            sessions[session] = None
            if len(sessions) > _MOST_TAILS:
                sessions.popitem(last=False)
        if len(self._known) > _MOST_KNOWN:
            self._forget_words(*self._known.popitem(last=False))

    def _forget_words(self, session: str, known: _LastPrompt) -> None:
        for word in known.found_by:
            if (sessions := self._by_word.get(word)) is not None:
                sessions.pop(session, None)
                if not sessions:
                    del self._by_word[word]

    def _note_end(self, end: PromptEnd, session: str) -> None:
        self._sessions[end] = session
        self._sessions.move_to_end(end)
        behind = self._ends.setdefault(end.after, OrderedDict())
        behind[end] = None
        behind.move_to_end(end)
        if len(behind) > _MOST_TAILS:
            self._forget_end(next(iter(behind)))
        while len(self._sessions) > self._most:
            self._forget_end(next(iter(self._sessions)))

    def _forget_end(self, end: PromptEnd) -> None:
        del self._sessions[end]
        behind = self._ends[end.after]
        del behind[end]
        if not behind:
            del self._ends[end.after]


def _alike(before: Words, now: Words) -> bool:
    """Tell whether two system prompts are the same but for a date or the like."""
    least = min(len(before), len(now))
    if least < _LEAST_WORDS:
        return max(len(before), len(now)) < 2 * _LEAST_WORDS
    return len(before & now) > _KEPT * least
