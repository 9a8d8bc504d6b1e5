"""``PrefixKeeper``: keeps prefixes warm: those of a file, and those of sessions that are open."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final

from ...graph.errors import ConfigError
from ..remote import RemoteError
from .precache_config import PrecacheConfig, new_prefix, read_precache
from .prefix_keys import prefix_key
from .stable_prefix import Message
from .warmer import Lease, Prefix, Warmed, Warmer

logger = logging.getLogger(__name__)

FORGOTTEN_S: Final = 3600.0
"""Seconds after which a session that nobody used is not kept warm any more; chosen: a session that
is never closed must not cost requests for ever."""
_LEASED: Final = ("accepted", "clipped")


class PrefixKeeper:
    """Warms prefixes before anybody asks, and again before they are too old.

        keeper = PrefixKeeper("precache.toml").start()
        keeper.open("chat-7", [{"role": "system", "content": "…"}])  # before its first turn
        keeper.used("chat-7")                                        # a turn has just begun with it
        keeper.close("chat-7")

    Requests are sent by a thread of its own: whoever opens a session waits for nothing.

    Args:
        file: What ``kvgraph precache`` reads.
        say: Called with what came of each prefix; None: what failed is logged.
        clock: Monotonic seconds.

    Raises:
        ConfigError: The file is wrong, or names one prefix twice.
    """

    def __init__(
        self,
        file: Path | str,
        say: Callable[[Warmed], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        path, self._clock = Path(file), clock
        self._config = read_precache(path)
        self._directory, self._say = path.absolute().parent, say or _log_failure
        self._prefixes = _named(self._config, self._directory)
        self._used: dict[str, float] = {}  # sessions that are open, and when they were used last
        self._opened: SimpleQueue[Prefix | None] = SimpleQueue()
        lease = _lease() if self._config.pin else None
        self._warmer = Warmer(self._config.server, lease=lease, clock=clock)

    def sweep(self) -> list[Warmed]:
        """Warm those that want it; says what came of each."""
        long_ago = self._clock() - FORGOTTEN_S
        for conversation in [each for each, used in list(self._used.items()) if used < long_ago]:
            self.close(conversation)
        return self._warm(list(self._prefixes.values()))

    def run(self) -> None:
        """Sweep again and again, until ``stop``; what opens meanwhile is warmed at once."""
        while True:
            self._safely(self.sweep)
            until = time.monotonic() + self._pause()
            while (left := until - time.monotonic()) > 0:
                try:
                    prefix = self._opened.get(timeout=left)
                except Empty:
                    break
                if prefix is None:
                    return
                self._safely(partial(self._warm, [prefix]))

    def start(self) -> PrefixKeeper:
        """Run on a thread of its own; returns itself."""
        threading.Thread(target=self.run, name="kvgraph-precache", daemon=True).start()
        return self

    def stop(self) -> None:
        """End ``run``, once the request under way is answered."""
        self._opened.put(None)

    def open(
        self,
        conversation: str,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        ttl: str = "60m",
    ) -> None:
        """Warm what a session's turns will begin with, and keep it until it is closed, or for an
        hour after its last use.

        Args:
            messages: The stable ones.
            tools: Of its requests.
            ttl: ``5m``, ``60m`` or ``24h``.

        Raises:
            ConfigError: Something of it is wrong.
        """
        config = new_prefix(
            conversation=conversation, messages=tuple(messages), tools=tuple(tools), ttl=ttl
        )
        stable = config.stable(self._directory)
        prefix = Prefix(prefix_key(conversation), stable, config.tools, config.seconds)
        self._prefixes[prefix.key] = prefix
        self._used[conversation] = self._clock()
        self._opened.put(prefix)

    def used(self, conversation: str) -> None:
        """Note that a request of a session has begun with its prefix: it is warm now."""
        prefix = self._prefixes.get(prefix_key(conversation))
        if prefix is not None:
            prefix.touch(now := self._clock(), 0.0)
            if conversation in self._used:
                self._used[conversation] = now

    def close(self, conversation: str) -> None:
        """Keep a session's prefix no longer."""
        if self._used.pop(conversation, None) is not None:
            self._prefixes.pop(prefix_key(conversation), None)

    def _warm(self, prefixes: Sequence[Prefix]) -> list[Warmed]:
        done = self._warmer.sweep([each for each in prefixes if self._is_kept(each)])
        for each in done:
            self._say(each)
        return done

    def _safely(self, sweep: Callable[[], object]) -> None:
        """Go on with the next sweep, whatever one meets."""
        try:
            sweep()
        except Exception as error:
            logger.warning("kvgraph: prefixes are not warmed: %s", type(error).__name__)
            logger.debug("kvgraph: prefixes are not warmed", exc_info=True)

    def _is_kept(self, prefix: Prefix) -> bool:
        return self._prefixes.get(prefix.key) is prefix

    def _pause(self) -> float:
        """Seconds until the next sweep; half of the shortest time to live, if that is less."""
        kept = list(self._prefixes.values())
        return min([self._config.sweep_s, *(each.seconds / 2 for each in kept)])


def _named(config: PrecacheConfig, directory: Path) -> dict[str, Prefix]:
    found: dict[str, Prefix] = {}
    for each in config.prefix:
        key = each.key(directory)
        if key in found:
            raise ConfigError(f"two prefixes are {key}: give one of them a conversation")
        found[key] = Prefix(key, each.stable(directory), each.tools, each.seconds)
    return found


def _lease() -> Lease | None:
    """Asks this user's only sidecar; None without one."""
    from ..intents.intent_client import IntentClient

    try:
        client = IntentClient()
    except RemoteError:
        return None

    def lease(key: str, seconds: float) -> float:
        try:
            answer = client.pin(session=key, seconds=seconds)
        except RemoteError:
            return 0.0
        whole = answer.get("answer") in _LEASED and answer["blocks"] == answer["asked"]
        return float(answer["seconds"] or 0.0) if whole else 0.0

    return lease


def _log_failure(done: Warmed) -> None:
    if done.how == "failed":
        logger.warning("kvgraph: %s: not warmed: %s", done.key, done.reason)
