"""Events that are completed on the sending thread, because they would take a step too long."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, Final, NamedTuple, Protocol

import msgspec
import numpy as np

from ...graph.wire.events import AnyEvent, Event, RequestFinished, RequestStarted
from ..keys import pack_hashes
from .mailbox import Mailbox
from .outbox import LateEvents, Later

_BYTES: Final = 8  # of a digest: the size of a block's key
_AT_ONCE: Final = 4_096  # tokens digested before other threads may run; chosen


class PromptDigests:
    """Digests of a prompt's blocks, computed on the sending thread."""

    __slots__ = ("_block_size", "_key", "_salt", "_tokens")

    def __init__(
        self,
        key: bytes,  # the sidecar's; see `ContentKey`
        tokens: Sequence[int],  # the prompt's; not changed any more
        block_size: int,  # tokens
        salt: str | None,  # the prompt's cache salt
    ) -> None:
        self._key, self._tokens = key, tokens
        self._block_size, self._salt = block_size, salt

    def digests(self) -> bytes:
        """Return eight bytes for each full block, digested with all before it, without the salt."""
        hasher, size = blake2b(digest_size=_BYTES, key=self._key), self._block_size
        found: list[bytes] = []
        step = max(1, _AT_ONCE // size) * size
        end = len(self._tokens) // size * size
        for first in range(0, end, step):
            part = np.array(self._tokens[first : min(first + step, end)], dtype="<i8").tobytes()
            for at in range(0, len(part), 8 * size):
                hasher.update(part[at : at + 8 * size])
                found.append(hasher.copy().digest())
            time.sleep(0)
        return b"".join(found)

    def salt(self) -> int:
        if self._salt is None:
            return 0
        said = self._salt.encode("utf-8", "surrogatepass")
        digest = blake2b(said, digest_size=_BYTES, key=self._key).digest()
        return int.from_bytes(digest, "little") or 1


_MOST: Final = 64  # prompts; chosen
_MOST_TOKENS: Final = 262_144  # in all; they are the engine's own lists, 9 MB at most; chosen


class _Prompt(NamedTuple):
    tokens: Sequence[int]
    hashes: Sequence[bytes]


class RecentPrompts:
    """The last prompts of an engine; used by the sending thread alone.

    The graph's keys show at which block two prompts diverge. Only the engine, while it has both
    prompts, can tell how many tokens of that block they share. Only that number leaves the engine.
    """

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._prompts: deque[_Prompt] = deque()
        self._tokens = 0

    def add(self, tokens: Sequence[int], hashes: Sequence[bytes], missing: int) -> int:
        """Remember a prompt, and compare it with earlier ones.

        Args:
            tokens: The prompt's token ids.
            hashes: Hashes of its full blocks; each covers all earlier tokens and the cache salt.
            missing: Index of the first block that was not found.

        Returns:
            How many leading tokens of that block an earlier prompt shares: less than a block, and 0
            if no remembered prompt diverges from this one in that block.
        """
        same = self._same(tokens, hashes, missing) if 0 < missing < len(hashes) else 0
        self._prompts.append(_Prompt(tokens, hashes))
        self._tokens += len(tokens)
        while len(self._prompts) > _MOST or self._tokens > _MOST_TOKENS:
            self._tokens -= len(self._prompts.popleft().tokens)
        return same

    def _same(self, tokens: Sequence[int], hashes: Sequence[bytes], missing: int) -> int:
        start, here, before = missing * self._size, hashes[missing], hashes[missing - 1]
        first = tokens[start]  # where it differs already, nothing is the same: so with most prompts
        parting = [
            each
            for each in self._prompts
            if len(each.hashes) > missing
            and each.tokens[start] == first
            and each.hashes[missing] != here
            and each.hashes[missing - 1] == before
        ]
        if not parting:
            return 0
        block = tokens[start : start + self._size]
        return max(_along(block, each.tokens[start : start + self._size]) for each in parting)


def _along(block: Sequence[int], other: Sequence[int]) -> int:
    for place, (token, theirs) in enumerate(zip(block, other, strict=False)):
        if token != theirs:
            return place
    return 0  # the same text under another adapter or image


def with_hashes(
    event: AnyEvent | Later,  # a request's start or end, without hashes
    hashes: Sequence[bytes],  # of its full blocks; not changed any more
    # digests of a starting prompt, where the sidecar wants them
    contents: PromptDigests | None = None,
    same_tokens: Callable[[], int] | None = None,  # compares a starting prompt with recent ones
) -> LateEvents:
    """Return the event, with its hashes packed when it is sent."""

    def events() -> Sequence[AnyEvent]:
        whole: dict[str, Any] = {"hashes": pack_hashes(hashes)}
        if contents is not None:
            whole |= {"contents": contents.digests(), "salt": contents.salt()}
        if same_tokens is not None:
            whole["same_tokens"] = same_tokens()
        return [
            msgspec.structs.replace(each, **whole)
            if isinstance(each, RequestStarted | RequestFinished)
            else each
            for each in ([event] if isinstance(event, Event) else event.events())
        ]

    return LateEvents(events)


class PromptRequest(Protocol):
    """A request as the engine has it; one without ``prompt_token_ids`` is not digested."""

    cache_salt: str | None
    lora_request: Any


class SaltedContents:
    """Computes digests of prompts that leave out their cache salts, from the first salted request
    on. If no caller uses a salt, it costs nothing.
    """

    def __init__(self, mailbox: Mailbox, block_size: int) -> None:
        self._mailbox = mailbox
        self._block_size = block_size
        self._has_salts = False

    def of(self, request: PromptRequest) -> PromptDigests | None:
        """Return a request's prompt, to be digested on the client's thread; reads a few attributes.
        Returns None if its hashes cover more than tokens and salt: an adapter, images, or
        embeddings.
        """
        salt, key = request.cache_salt, self._mailbox.content_key
        self._has_salts = self._has_salts or salt is not None
        tokens: Sequence[int] | None = getattr(request, "prompt_token_ids", None)
        if not self._has_salts or key is None or tokens is None:
            return None
        if request.lora_request is not None or getattr(request, "mm_features", None):
            return None
        return PromptDigests(key, tokens, self._block_size, salt)
