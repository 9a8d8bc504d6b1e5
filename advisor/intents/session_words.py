"""``SessionWords``: what an agent framework says of its sessions, told by a thread of its own."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from ...graph.errors import KvGraphError
from .intent_client import IntentClient

logger = logging.getLogger(__name__)

Word = Callable[[IntentClient], Any]

# An engine tells of a request's end five times per second, and a busy sidecar hears it later. A
# signal counts only when no request of its session runs: chosen, as ``kvgraph precache`` waits.
SETTLE_S: Final = 0.5
_MOST: Final = 1024  # sessions of which a word waits to be told; chosen
_NAME: Final = 256  # characters of a name, as requests' hints are cut
_REST_S: Final = 10.0  # without a question to a sidecar that did not answer; chosen


class _Due(NamedTuple):
    """A word that waits to be told.

    Attributes:
        at: When it is due, in monotonic seconds.
        waits: Whether it is that the session waits for a tool.
        again: Whether it was told before, to a sidecar that knew no such session yet.
    """

    at: float
    word: Word
    waits: bool
    again: bool = False


class SessionWords:
    """Tells a sidecar the latest word on each session, half a second after it was said.

    Whoever speaks waits for nothing and gets no error: a word goes into a bounded table, in which a
    newer word on its session replaces it. A busy sidecar may not have heard of a session yet: then
    its word is told a second time, as late again. Where no sidecar answers, words are dropped for
    ten seconds, with one line in the log until one answers again.

    Args:
        connect: Makes the client; asked again after each silence.
        tenant: Whose sessions they are; None: nobody's in particular.
        settle_s: Seconds for which a word waits.
    """

    def __init__(
        self,
        connect: Callable[[], IntentClient] = IntentClient,
        tenant: str | None = None,
        settle_s: float = SETTLE_S,
    ) -> None:
        self._connect, self._tenant, self._settle_s = connect, tenant, settle_s
        self._words: OrderedDict[str, _Due] = OrderedDict()  # the first due first
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._client: IntentClient | None = None
        self._silent_until = 0.0
        self._said: set[str] = set()

    def waits(self, session: str, tool: str | None) -> None:
        """Say that a session waits for a tool."""
        name, tool = session[:_NAME], (tool or "")[:_NAME] or None
        self._say(session, lambda to: to.waiting(name, tool, tenant=self._tenant), waits=True)

    def goes_on(self, session: str) -> None:
        """Do not say any more that a session waits for a tool, if that was not told yet."""
        with self._changed:
            if session in self._words and self._words[session].waits:
                del self._words[session]

    def turn_ended(self, session: str) -> None:
        """Say that a session waits for a person."""
        self._say(session, lambda to: to.turn_ended(session[:_NAME], self._tenant))

    def ended(self, session: str) -> None:
        """Say that a session is over."""
        self._say(session, lambda to: to.ended(session[:_NAME], self._tenant))

    def close(self, wait_s: float = 1.0) -> None:
        """Tell what waits at once, and wait for it no longer than ``wait_s`` seconds."""
        with self._changed:
            self._closing = True
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join(wait_s)

    def _say(self, session: str, word: Word, waits: bool = False) -> None:
        with self._changed:
            if session in self._words:
                del self._words[session]
            elif len(self._words) >= _MOST:
                self._words.popitem(last=False)
            self._words[session] = _Due(time.monotonic() + self._settle_s, word, waits)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="kvgraph-words", daemon=True)
                with contextlib.suppress(RuntimeError):  # the interpreter is about to end
                    self._thread.start()
            self._changed.notify()

    # On the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while (following := self._next()) is not None:
            if time.monotonic() >= self._silent_until:
                self._tell(*following)

    def _next(self) -> tuple[str, _Due] | None:
        """Wait for the next session whose word is due; None once all is told after ``close``."""
        with self._changed:
            while True:
                first = next(iter(self._words.values()), None)
                due_s = first.at - time.monotonic() if first is not None else None
                if first is not None and (self._closing or (due_s or 0.0) <= 0):
                    return self._words.popitem(last=False)
                if self._closing:
                    return None
                self._changed.wait(due_s)

    def _tell(self, session: str, due: _Due) -> None:
        try:
            self._client = self._client or self._connect()
            answer = due.word(self._client)["answer"]
        except Exception as error:  # whatever it is, the agent goes on
            self._client, self._silent_until = None, time.monotonic() + _REST_S
            reason = error if isinstance(error, KvGraphError) else type(error).__name__
            self._log("silent", "kvgraph: signals are dropped: %s", reason)
            return
        self._said.discard("silent")
        if answer == "missing" and not self._said_again(session, due):
            self._log("missing", "kvgraph: the sidecar knows no session of an agent's name; do "
                      "its requests carry kvgraph.hints(session=…)?")  # fmt: skip

    def _said_again(self, session: str, due: _Due) -> bool:
        """Whether a session has another word to come, this one once more if it was told once."""
        with self._changed:
            if session not in self._words and not due.again and not self._closing:
                at = time.monotonic() + self._settle_s
                self._words[session] = due._replace(at=at, again=True)
            return session in self._words

    def _log(self, what: str, message: str, *values: object) -> None:
        if what not in self._said:
            self._said.add(what)
            logger.warning(message, *values)
