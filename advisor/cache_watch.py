"""``CacheWatch``: shows a ``ConfKVCache`` on a sidecar's page while a model writes.

with CacheWatch(cache, "my model"):
    model.generate(**inputs, past_key_values=cache)
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import accumulate
from typing import Any, Final, Protocol, Self

from ..graph.errors import ConfigError
from ..graph.wire.events import MAX_NAME
from .page.caches import MOST_STEPS
from .tools.remote import EditEndpoint, RemoteError

PERIOD_S: Final = 0.5  # seconds between two reports; chosen: the page polls once a second
_ANSWER_S: Final = 2.0  # timeout of the sidecar's answer; chosen

_log = logging.getLogger(__name__)


class Traced(Protocol):
    """A cache that records its steps, as ``ConfKVCache`` does."""

    @property
    def settings(self) -> Any:
        """Its bounds in tokens: ``low`` and ``high``."""

    @property
    def trace(self) -> deque[Any]:
        """Its steps: ``confidence`` and ``budgets`` of each sequence, ``held``, and ``at``."""


class CacheWatch:
    """Reports what a cache holds to a sidecar twice a second, on its own thread.

    The model never waits for it. One warning is logged if no sidecar answers, or if several run and
    none is named; another line when reporting succeeds, and the last ``MOST_STEPS`` steps are then
    shown. Without ``url``, a restarted sidecar is found under any port. Leaving the context waits
    up to four seconds.
    """

    def __init__(
        self,
        cache: Traced,
        run: str,
        url: str | None = None,
        token: str | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Watch a cache under the name of its run.

        Args:
            url: The sidecar's; None: that of this user's only one.
            token: The sidecar's; None: that of its runtime note, or the environment's.
            wall: Unix seconds.

        Raises:
            ConfigError: The name is too long, or empty.
            RemoteError: ``url`` is not a URL.
        """
        if not run.isprintable():
            raise ConfigError("the run's name has characters that cannot be printed")
        if not 1 <= len(run) <= MAX_NAME:
            raise ConfigError(f"the run's name has {len(run)} characters; allowed: 1 to {MAX_NAME}")
        self._cache, self._run = cache, run
        self._where = url, token
        self._endpoint = None if url is None else EditEndpoint("/v1/caches", url, token)
        self._started = wall()
        self._told: tuple[Any, int] = None, 0  # the last step, and how many
        self._is_silent = False
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def told(self) -> int:
        """Return how many steps were reported, or skipped as too many at once."""
        return self._told[1]

    def __enter__(self) -> Self:
        self._over = threading.Event()  # a former thread may still wait for an answer
        self._thread = threading.Thread(
            target=self._watch, args=(self._over,), name="kvgraph-cache", daemon=True
        )
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join(2 * _ANSWER_S)

    def _watch(self, leaves: threading.Event) -> None:
        over = False
        while not over:
            over = leaves.wait(PERIOD_S)
            try:
                self._tell()
            except Exception as error:  # the model goes on, and the next report tries again
                if not self._is_silent:
                    _log.warning("run %r is not shown: %s", self._run, error)
                self._is_silent = True
                self._endpoint = None  # a sidecar that restarts has another port

    def _tell(self) -> None:
        last, told = self._told
        new = self._steps_after(last)
        if not new:
            return
        steps, settings = new[-MOST_STEPS:], self._cache.settings
        first = told + len(new) - len(steps)
        self._endpoint = self._endpoint or EditEndpoint("/v1/caches", *self._where)
        answer = self._endpoint.send(
            {
                "run": self._run,
                "started": self._started,
                "first": first,
                "low": settings.low,
                "high": settings.high,
                "at": [*accumulate((step.at for step in steps), max)],  # a clock may be set back
                "confidence": [_sure(step) for step in steps],
                "budget": [sum(step.budgets) / len(step.budgets) for step in steps],
                "held": [step.held for step in steps],
            },
            _ANSWER_S,
        )
        if not answer["taken"]:
            raise RemoteError("another one of this name is being shown")
        self._told = steps[-1], first + len(steps)
        if self._is_silent:
            self._is_silent = False
            _log.warning("run %r is shown now", self._run)  # as loud as that it was not

    def _steps_after(self, last: Any) -> list[Any]:
        found: list[Any] = []
        # The model's thread adds to the trace meanwhile; a copy is made without a pause.
        for step in reversed(self._cache.trace.copy()):
            if step is last:
                break
            found.append(step)
        return found[::-1]


def _sure(step: Any) -> float:
    """The mean confidence of a batch; 0 where logits are not numbers."""
    mean: float = sum(step.confidence) / len(step.confidence)
    return mean if 0.0 <= mean <= 1.0 else 0.0
