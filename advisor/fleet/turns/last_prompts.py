"""``LastPrompts``: which session a prompt continues that names none."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any, Final, NamedTuple

from ..pool_shadows import MOST_LINKS_HELD
from .prompt_chains import MOST_LINKS, NEAREST, End, Prompt, Words, words_of

_MOST_TAILS: Final = 64  # prompts that are known to end behind one link, or by one word; chosen
_MOST_KNOWN: Final = 50_000  # sessions whose last prompt's words are remembered: 150 MB. Chosen
_FOUND_BY: Final = 4  # words of a message by which it is found again; chosen
_LEAST_WORDS: Final = 8  # of a system prompt that tells two apart; chosen
_KEPT: Final = 0.5  # of a last prompt: what keeps more goes on with it, as for the sidecar

Digest = Callable[[bytes, Any], bytes]
"""The digest of a piece that follows what has another digest."""


class _Owner(NamedTuple):
    """Who said something; None: several did.

    Attributes:
        first: Whether that was in its first prompt.
    """

    session: str | None
    first: bool = True


class _Known(NamedTuple):
    """A session's last prompt.

    Attributes:
        at: Larger than those noted before.
        messages, tokens: Of it, without the system's.
        newest, newest_tokens, digest: Of its last message.
    """

    at: int
    messages: int
    tokens: int
    newest: Words
    newest_tokens: int
    digest: bytes
    system: Words
    found_by: tuple[tuple[bytes, int], ...]


class LastPrompts:
    """Remembers which session each prompt was the last one of. May be asked by several threads.

    A prompt goes on with a session if it begins with the whole of one of its prompts; else, if it
    keeps more than half of its last one, what nobody else said among it, and has an answer to it.
    Prompts that only begin alike, as with examples, have none.

    Args:
        digest: Of pieces, as their reader makes them.
        most: Prompts that are remembered, and messages.
    """

    def __init__(self, digest: Digest, most: int = MOST_LINKS_HELD) -> None:
        self._digest, self._most = digest, most
        self._lock = threading.Lock()
        self._sessions: OrderedDict[End, str] = OrderedDict()  # of prompts without messages
        self._ends: dict[bytes, OrderedDict[End, None]] = {}  # by what they are behind
        self._chats: OrderedDict[bytes, str] = OrderedDict()  # by all that was said
        self._owners: dict[bytes, _Owner] = {}  # by what was said
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._by_word: dict[tuple[bytes, int], OrderedDict[str, None]] = {}
        self._noted = 0

    def session(self, prompt: Prompt, scope: bytes) -> str | None:
        """The session that a prompt continues; None if it continues none.

        Args:
            scope: Whose prompt it is.
        """
        with self._lock:
            if prompt.pieces:
                exact = self._continued_text(prompt, scope)
            else:
                exact = self._continued_chat(prompt)
            return exact or self._likeliest(prompt)

    def note(self, prompt: Prompt, session: str) -> None:
        """Note that a session's last prompt is this one."""
        with self._lock:
            if prompt.end is not None:
                self._note_end(prompt.end, session)
            elif prompt.said:
                self._chats[prompt.said[-1].chain] = session
                self._chats.move_to_end(prompt.said[-1].chain)
                if len(self._chats) > self._most:
                    self._chats.popitem(last=False)
            if prompt.said:
                self._note_said(prompt, session)

    def _continued_text(self, prompt: Prompt, scope: bytes) -> str | None:
        """The session whose whole prompt without messages this one extends."""
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
        """The session whose whole chat this one extends; what only users said may be said under
        other words of the system, too."""
        said = prompt.said
        until = len(said) if len(prompt.links) == MOST_LINKS else len(said) - 1
        for at in range(until - 1, -1, -1):
            if (session := self._chats.get(said[at].chain)) is None:
                continue
            known = self._known.get(session)
            answered = any(each.by_model for each in said[: at + 1])
            if answered or known is None or _alike(known.system, prompt.system):
                return session
        return None

    def _likeliest(self, prompt: Prompt) -> str | None:
        """The session of whose last prompt this one keeps most, if that is more than half."""
        said, kept, beyond = prompt.said, Counter[str](), set[str]()
        answered, again = set[str](), dict[str, float]()
        digests = {each.digest for each in said[:-1]}
        for each in said[:-1]:
            session, first = self._owners.get(each.digest, _Owner(None))
            if session is None:
                continue
            kept[session] += each.tokens
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
            grew = len(said) > known.messages and said[known.messages].by_model
            goes_on = known.digest in digests or share > _KEPT or session in beyond or grew
            own = session in answered or session in beyond  # whatever the system's words are
            alike = own or _alike(known.system, prompt.system)
            tokens = kept[session] + share * known.newest_tokens
            if goes_on and alike and tokens > _KEPT * known.tokens:
                # Of chats that begin alike, the one that was asked first goes on first.
                best, most = max((best, most), (session, (tokens, -known.at)), key=itemgetter(1))
        return best

    def _asked_again(self, prompt: Prompt) -> Iterator[tuple[str, float]]:
        """Sessions of whose newest message this prompt has a part, not as the last one; and how
        large a part."""
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
        owner = _Owner(session, before is None)
        for each in said:
            theirs = self._owners.setdefault(each.digest, owner)
            if theirs.session not in (session, None):
                self._owners[each.digest] = _Owner(None)
        while len(self._owners) > self._most:
            del self._owners[next(iter(self._owners))]
        if before is not None:
            self._forget_words(session, before)
        found_by = tuple((prompt.scope, word) for word in sorted(prompt.newest)[:_FOUND_BY])
        self._noted += 1
        last, tokens = said[-1], sum(each.tokens for each in said)
        self._known[session] = _Known(
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

    def _forget_words(self, session: str, known: _Known) -> None:
        for word in known.found_by:
            if (sessions := self._by_word.get(word)) is not None:
                sessions.pop(session, None)
                if not sessions:
                    del self._by_word[word]

    def _note_end(self, end: End, session: str) -> None:
        self._sessions[end] = session
        self._sessions.move_to_end(end)
        behind = self._ends.setdefault(end.after, OrderedDict())
        behind[end] = None
        behind.move_to_end(end)
        if len(behind) > _MOST_TAILS:
            self._forget_end(next(iter(behind)))
        while len(self._sessions) > self._most:
            self._forget_end(next(iter(self._sessions)))

    def _forget_end(self, end: End) -> None:
        del self._sessions[end]
        behind = self._ends[end.after]
        del behind[end]
        if not behind:
            del self._ends[end.after]


def _alike(before: Words, now: Words) -> bool:
    """Whether two system prompts are one, but for a date or the like."""
    least = min(len(before), len(now))
    if least < _LEAST_WORDS:
        return max(len(before), len(now)) < 2 * _LEAST_WORDS
    return len(before & now) > _KEPT * least
