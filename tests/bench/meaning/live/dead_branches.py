"""``dead_branch_first``: whether what a chat left behind when it was compacted is evicted first.

Several chats grow, and the last of them is compacted: its client sends a summary in place of the
history. LRU would evict the others first, which go on. vLLM's own KV events say what goes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import httpx
from kvgraph.graph.types import SourceLayer

from ...serving.cache_ledger import Digest, Ledger, chain_digest
from ...serving.vllm_server import Server
from ...serving.workload import BLOCK
from .chat_model import Words
from .chat_server import POOL, Message, ask, said

if TYPE_CHECKING:
    from openai import OpenAI

_CHATS: Final = 3  # this, and the next two, are chosen
_TURNS: Final = 8
_SYSTEM, _SAID, _SUMMARY, _OTHERS = 6, 3, 4, 10  # blocks
_SETTLE_S: Final = 2.0  # until a sidecar has ranked what has just ended

# The ledger tells blocks apart by their layers: chats' blocks get two that are not used here.
_DEAD: Final = SourceLayer.AFFECT
_LIVE: Final = SourceLayer.MEMORIES


@dataclass(slots=True)
class Left:
    """How many blocks of chats were evicted."""

    dead: int = 0
    live: int = 0

    @property
    def dead_first(self) -> float:
        """Share."""
        return self.dead / max(1, self.dead + self.live)


def dead_branches(
    server: Server, client: OpenAI, ledger: Ledger, words: Words, rounds: int
) -> Left:
    """Of the blocks of chats that go first, as many as are dead, how many are dead."""
    found = Left()
    for _ in range(rounds):
        _round(_Chats(server, client, words), ledger, found)
    return found


class _Chats:
    """Chats that grow."""

    def __init__(self, server: Server, client: OpenAI, words: Words) -> None:
        self._url, self._client, self._words = server.url, client, words
        self.known: dict[Digest, SourceLayer] = {}

    def play(self) -> None:
        """Let them grow, and compact the last one."""
        for _ in range(_CHATS):
            messages = [said("system", self._words.text(_SYSTEM * BLOCK))]
            for _ in range(_TURNS):
                messages.append(said("user", self._words.text(_SAID * BLOCK)))
                messages.append(said("assistant", ask(self._client, messages, 4).text or "."))
            self.known.update(dict.fromkeys(self._blocks(messages), _LIVE))
        whole = set(self._blocks(messages))
        compacted = [messages[0], said("user", self._words.text(_SUMMARY * BLOCK))]
        ask(self._client, compacted, 4)
        still = set(self._blocks(compacted))
        self.known.update(dict.fromkeys(whole - still, _DEAD))
        self.known.update(dict.fromkeys(still, _LIVE))

    def press(self) -> None:
        """Another client's prompt."""
        ask(self._client, [said("user", self._words.text(_OTHERS * BLOCK))], 1)

    def _blocks(self, messages: list[Message]) -> Iterator[Digest]:
        """The full blocks of a prompt of these messages, as the engine cuts it."""
        body = {"model": "demo", "messages": messages, "add_generation_prompt": False}
        answer = httpx.post(f"{self._url}/tokenize", json=body, timeout=60.0, trust_env=False)
        tokens, digest = answer.raise_for_status().json()["tokens"], Digest()
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            digest = chain_digest(digest, tokens[start : start + BLOCK])
            yield digest


def _round(chats: _Chats, ledger: Ledger, found: Left) -> None:
    chats.play()
    ledger.know(chats.known)
    ledger.take()
    time.sleep(_SETTLE_S)
    dead = sum(layer is _DEAD for layer in chats.known.values())
    left = Left()
    for _ in range(2 * POOL // _OTHERS):
        chats.press()
        evicted = ledger.take().evicted
        left.dead, left.live = left.dead + evicted[_DEAD], left.live + evicted[_LIVE]
        if left.dead + left.live >= dead:
            break
    found.dead, found.live = found.dead + left.dead, found.live + left.live
