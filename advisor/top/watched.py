"""``Watcher``: asks the running sidecars again and again, on a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from ..remote import RemoteError, ask, sidecar_urls
from ..times.spoken_times import time_of_day

_MISSES_EVERY: Final = 5  # looks; chosen


@dataclass(frozen=True, slots=True)
class Watched:
    """One sidecar as it answered last.

    Attributes:
        now: Its ``/v1/now``; None: it never answered.
        misses: Its ``/v1/misses``.
        trouble: Why it gives no answer now, in words; None: it does.
    """

    url: str
    now: Mapping[str, Any] | None = None
    misses: Mapping[str, Any] | None = None
    trouble: str | None = None


class Watcher:
    """Keeps the last answer of every sidecar, also while it restarts.

    Args:
        url: Of one sidecar; None: all that run, which are looked for at each look.
        interval_s: Seconds between looks.

    Attributes:
        latest: What the last look found.
        looks: How many looks there were.
    """

    def __init__(self, url: str | None, interval_s: float) -> None:
        self._url = url
        self._interval_s = interval_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvgraph-top", daemon=True)
        self.latest: Sequence[Watched] = ()
        self.looks = 0

    def first_look(self) -> None:
        """Look once.

        Raises:
            RemoteError: No sidecar runs, or none of those that do answers.
        """
        found = [_asked(Watched(each), True) for each in sidecar_urls(self._url)]
        if all(each.now is None for each in found):
            raise RemoteError(found[0].trouble or "no sidecar answers")
        self._note(found)

    def start(self) -> None:
        """Go on looking, on a thread of its own."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more; does not wait for an answer that is under way."""
        self._stopping.set()

    def look(self) -> None:
        """Look again; who does not answer keeps what it answered last."""
        before = {each.url: each for each in self.latest}
        try:
            urls = sidecar_urls(self._url)
        except RemoteError:
            waits = "it is gone; waiting for a sidecar to start"
            self._note([replace(each, trouble=waits) for each in self.latest])
            return
        anew = self.looks % _MISSES_EVERY == 0
        self._note([_asked(before.get(url, Watched(url)), anew) for url in urls])

    def _note(self, found: Sequence[Watched]) -> None:
        self.latest = found
        self.looks += 1

    def _run(self) -> None:
        while not self._stopping.wait(self._interval_s):
            try:
                self.look()
            except Exception as error:  # whatever it is, the next look may go better
                why = f"the look failed ({type(error).__name__})"
                self._note([replace(each, trouble=why) for each in self.latest])


def _asked(before: Watched, anew: bool) -> Watched:
    """What a sidecar answers now, or else what it answered before and why it does not.

    Args:
        anew: Whether to ask for the misses again: twelve hours of them are a large answer.
    """
    try:
        now = ask(before.url, "/v1/now")
        misses = ask(before.url, "/v1/misses") if anew or not before.misses else before.misses
    except RemoteError as error:
        since = f"; this is as of {time_of_day(before.now['at'])}" if before.now else ""
        return replace(before, trouble=f"{error}{since}")
    return Watched(before.url, now, misses)
