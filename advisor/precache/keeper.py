"""``PrefixKeeper``: keeps prefixes in the cache, those of a file and those of open sessions."""

from __future__ import annotations

import json
import logging
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Annotated, Any, Final, NamedTuple

import typer

from ...graph.errors import ConfigError, KvGraphError
from ...graph.wire.opener import opener
from ..intents.client import hints
from ..tools.remote import RemoteError
from .prefixes import (
    Message,
    PrecacheConfig,
    ServerConfig,
    new_prefix,
    prefix_key,
    read_precache,
    warming_messages,
)

_MOST_SAID: Final = 300  # bytes of a refusal that are shown; chosen
_MOST_ANSWERED: Final = 1 << 20  # bytes of an answer, one token or a list of models; chosen
_FINAL: Final = (400, 413, 422)  # statuses of a body that will always be refused
_HEARD_S: Final = 0.5  # an engine reports five times per second, and a sidecar may be busy; chosen
_TRIES: Final = 4  # to lease, while the sidecar does not know the blocks yet; chosen
_RENEW: Final = 0.8  # share of its time to live after which an unused prefix is computed again


@dataclass(slots=True)
class Prefix:
    key: str
    stable: list[Message]
    tools: tuple[dict[str, Any], ...]
    seconds: float  # its time to live
    touched: float | None = None  # when it was last computed or leased
    lasts: float = 0.0  # seconds for which it is kept after that
    broken: str = ""  # why it is no longer tried

    def touch(self, now: float, leased: float) -> None:
        self.touched, self.lasts = now, min(self.seconds, leased or self.seconds)

    def wants(self, now: float) -> bool:
        due = self.touched is None or now - self.touched >= _RENEW * self.lasts
        return due and not self.broken


class WarmResult(NamedTuple):
    """The result of warming one prefix."""

    key: str
    how: str  # cold (was computed), warm (was cached), unknown which, leased, or failed
    tokens: int = 0  # tokens of the prompt; 0 if the server does not report it
    cached: int = 0
    reason: str = ""  # why it failed or is cold again
    # the beginning of the server's answer for a prefix that failed; it may quote the prefix, so it
    # must not be logged
    said: str = ""


Ask = Callable[[str, dict[str, Any] | None], Any]
# Leases a session's blocks by its name, for some seconds; returns the seconds for which all of them
# are leased, and 0 if some are not.
Lease = Callable[[str, float], float]


class Warmer:
    """Makes a server compute prefixes, by requests for one token at temperature 0.

    If a sidecar grants leases, a computed prefix is leased at once, so that other traffic does not
    evict it. A prefix that the server refuses is not tried again; one that could not be sent is
    tried in the next sweep.
    """

    def __init__(
        self,
        server: ServerConfig,
        ask: Ask | None = None,
        lease: Lease | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._server = server
        self._ask = ask or partial(ask_server, server)
        self._lease = lease
        self._clock, self._sleep = clock, sleep
        self._model = server.model

    def sweep(self, prefixes: Sequence[Prefix]) -> list[WarmResult]:
        now = self._clock()
        return [self._keep(each) for each in prefixes if each.wants(now)]

    def _keep(self, prefix: Prefix) -> WarmResult:
        """Lease a prefix that was warm before, or else have it computed."""
        if prefix.touched is not None and (leased := self._leased(prefix)):
            prefix.touch(self._clock(), leased)
            return WarmResult(prefix.key, "leased")
        try:
            answer = self._ask("/chat/completions", self._body(prefix))
            usage = answer.get("usage") or {}
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
            tokens = int(usage.get("prompt_tokens") or 0)
            warmed = _warmed(prefix, tokens, None if cached is None else int(cached))
        except ServerRefusalError as error:
            prefix.broken = str(error) if error.is_final else ""
            return WarmResult(prefix.key, "failed", reason=str(error), said=error.said)
        except (AttributeError, LookupError, ValueError, TypeError, OverflowError):
            return WarmResult(
                prefix.key, "failed", reason=f"{self._server.url} gave no such answer"
            )
        prefix.touch(self._clock(), self._leased(prefix, _TRIES))
        return warmed

    def _leased(self, prefix: Prefix, tries: int = 1) -> float:
        for number in range(tries if self._lease is not None else 0):
            if number:
                self._sleep(_HEARD_S)
            if self._lease is not None and (leased := self._lease(prefix.key, prefix.seconds)):
                return leased
        return 0.0

    def _body(self, prefix: Prefix) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._named(),
            "messages": warming_messages(prefix.stable),
            "max_tokens": 1,
            "temperature": 0,
            "stream": False,
        }
        if self._lease is not None:  # other servers may refuse a field that they do not know
            body |= hints(session=prefix.key, warming=True)
        return {**body, "tools": list(prefix.tools)} if prefix.tools else body

    def _named(self) -> str:
        if not self._model:
            listed = self._ask("/models", None)
            self._model = str(listed["data"][0]["id"])
        return self._model


def _warmed(prefix: Prefix, tokens: int, cached: int | None) -> WarmResult:
    """``cached``: tokens that were cached; None if that is not known."""
    if cached is None:
        return WarmResult(prefix.key, "unknown", tokens)
    if 2 * cached > tokens:
        return WarmResult(prefix.key, "warm", tokens, cached)
    again = "lost since it was warmed, or shorter than a block of the server's"
    return WarmResult(prefix.key, "cold", tokens, cached, "" if prefix.touched is None else again)


class ServerRefusalError(KvGraphError):
    """A server did not do what it was asked.

    Attributes:
        is_final: Whether it would refuse again.
        said: The beginning of its answer.
    """

    def __init__(self, message: str, *, is_final: bool = False, said: str = "") -> None:
        super().__init__(message)
        self.is_final, self.said = is_final, said


def ask_server(server: ServerConfig, path: str, body: dict[str, Any] | None) -> Any:
    """Send a body, or a GET without one, and return the JSON answer."""
    if not (server.key.isascii() and server.key.isprintable()):
        words = f"{server.key_variable} holds characters that no header may have"
        raise ServerRefusalError(words, is_final=True)
    headers = {"Authorization": f"Bearer {server.key}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.url.rstrip("/") + path, data, headers)
    try:
        with opener(through_proxies=True).open(request, timeout=server.timeout_s) as answer:
            return json.loads(answer.read(_MOST_ANSWERED))
    except urllib.error.HTTPError as error:
        with error:
            said = error.read(_MOST_SAID).decode(errors="replace").strip()
        final = error.code in _FINAL
        words = f"{server.url} answered {error.code}"
        raise ServerRefusalError(words, is_final=final, said=said) from None
    except (OSError, HTTPException, ValueError, RecursionError) as error:
        reason = getattr(error, "reason", type(error).__name__)
        raise ServerRefusalError(f"{server.url} cannot be asked: {reason}") from None


logger = logging.getLogger(__name__)

# Time after which an unused session is no longer kept. Chosen: a session that is never closed must
# not cost requests forever.
FORGOTTEN_S: Final = 3600.0
_LEASED: Final = ("accepted", "clipped")


class PrefixKeeper:
    """Computes prefixes ahead of requests, and again before they expire.

        keeper = PrefixKeeper("precache.toml").start()
        keeper.open("chat-7", [{"role": "system", "content": "…"}])  # before its first turn
        keeper.used("chat-7")                                        # a turn has just begun with it
        keeper.close("chat-7")

    Requests are sent by its own thread, so that opening a session never waits.

    Args:
        file: A configuration file of ``kvgraph precache``.
        say: Called with the result for each prefix; by default, failures are logged.
        clock: Monotonic seconds.

    Raises:
        ConfigError: The file is wrong, or names one prefix twice.
    """

    def __init__(
        self,
        file: Path | str,
        say: Callable[[WarmResult], None] | None = None,
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

    def sweep(self) -> list[WarmResult]:
        """Warm the prefixes that are due; return the result for each."""
        long_ago = self._clock() - FORGOTTEN_S
        for conversation in [each for each, used in list(self._used.items()) if used < long_ago]:
            self.close(conversation)
        return self._warm(list(self._prefixes.values()))

    def run(self) -> None:
        """Sweep repeatedly until ``stop``; sessions opened meanwhile are warmed at once."""
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
        """Run on a thread of its own; return the keeper."""
        threading.Thread(target=self.run, name="kvgraph-precache", daemon=True).start()
        return self

    def stop(self) -> None:
        """End ``run``, once the current request is answered."""
        self._opened.put(None)

    def open(
        self,
        conversation: str,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        ttl: str = "60m",
    ) -> None:
        """Warm the prefix of a session's turns, and keep it until the session is closed or unused
        for an hour.

        Args:
            conversation: The session's name.
            messages: The stable messages at the start of each turn.
            tools: Tools of its requests.
            ttl: ``5m``, ``60m`` or ``24h``.

        Raises:
            ConfigError: An argument is wrong; names it.
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
        """Note that a session's request has begun with its prefix, which is therefore cached."""
        prefix = self._prefixes.get(prefix_key(conversation))
        if prefix is not None:
            prefix.touch(now := self._clock(), 0.0)
            if conversation in self._used:
                self._used[conversation] = now

    def close(self, conversation: str) -> None:
        """Stop keeping a session's prefix."""
        if self._used.pop(conversation, None) is not None:
            self._prefixes.pop(prefix_key(conversation), None)

    def _warm(self, prefixes: Sequence[Prefix]) -> list[WarmResult]:
        done = self._warmer.sweep(
            [each for each in prefixes if self._prefixes.get(each.key) is each]
        )
        for each in done:
            self._say(each)
        return done

    def _safely(self, sweep: Callable[[], object]) -> None:
        try:
            sweep()
        except Exception as error:
            logger.warning("kvgraph: prefixes are not warmed: %s", type(error).__name__)
            logger.debug("kvgraph: prefixes are not warmed", exc_info=True)

    def _pause(self) -> float:
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
    """A function that asks this user's only sidecar; None without one."""
    from ..intents.client import IntentClient

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


def _log_failure(done: WarmResult) -> None:
    if done.how == "failed":
        logger.warning("kvgraph: %s: not warmed: %s", done.key, done.reason)


_UNTOLD: Final = (
    "the server does not say how much was cached (vLLM does with --enable-prompt-tokens-details)"
)


def precache(
    file: Annotated[Path, typer.Argument(help="A TOML file that names a server and prefixes.")],
    watch: Annotated[
        bool, typer.Option("--watch", help="Keep them: sweep again and again, until Ctrl-C.")
    ] = False,
) -> None:
    """Have stable prefixes computed before anybody asks, on any OpenAI-compatible server."""
    keeper = PrefixKeeper(file, lambda done: typer.echo(_line(done)))
    if watch:
        keeper.run()
    raise typer.Exit(1 if any(each.how == "failed" for each in keeper.sweep()) else 0)


def _line(done: WarmResult) -> str:
    if done.how == "failed":
        return f"{done.key}: failed: {done.reason}" + (f": {done.said!r}" if done.said else "")
    if done.how == "leased":
        return f"{done.key}: leased"
    if done.how == "unknown":
        return f"{done.key}: computed, or there already: {_UNTOLD}"
    again = f"; {done.reason}" if done.reason else ""
    return f"{done.key}: {done.how}, {done.cached:,} of {done.tokens:,} tokens were cached{again}"
