"""What each arm's cache kept and lost by source layer, read from vLLM's own KV events."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import httpx
import msgspec
from kvgraph.graph.types import PROTECTED_LAYERS, SourceLayer
from prometheus_client.parser import text_string_to_metric_families

from ..errors import ServerError
from .workload import BLOCK

Digest = bytes
_ROOT: Final = b""


class _Stored(msgspec.Struct, tag="BlockStored", gc=False):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int


class _Removed(msgspec.Struct, tag="BlockRemoved", gc=False):
    block_hashes: list[int | bytes]


class _Cleared(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    pass


_Event = _Stored | _Removed | _Cleared


class _Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[_Event]


def chain_digest(parent: Digest, tokens: Iterable[int]) -> Digest:
    """Identifies a block by its tokens and everything before them."""
    raw = b"".join(token.to_bytes(4, "little") for token in tokens)
    return hashlib.blake2b(parent + raw, digest_size=16).digest()


@dataclass
class Tally:
    """Counts of one pass; a block counts as evicted when its last copy has gone."""

    stored: Counter[SourceLayer] = field(default_factory=Counter)
    evicted: Counter[SourceLayer] = field(default_factory=Counter)
    again: Counter[SourceLayer] = field(default_factory=Counter)  # evicted, and computed once more

    @property
    def protected_lost(self) -> int:
        """Evictions of blocks of a protected layer."""
        return sum(self.evicted[layer] for layer in PROTECTED_LAYERS)

    @property
    def protected_again(self) -> int:
        """Those of them that a later request computed again."""
        return sum(self.again[layer] for layer in PROTECTED_LAYERS)


class Books:
    """Applies decoded KV events to a tally; knows what is resident."""

    def __init__(self, known: dict[Digest, SourceLayer]) -> None:
        self.known = dict(known)
        self._digests: dict[int | bytes, Digest] = {}
        self._copies: Counter[int | bytes] = Counter()
        self._lost: set[int | bytes] = set()
        self._decoder = msgspec.msgpack.Decoder(_Batch)
        self.tally = Tally()

    def apply(self, payload: bytes) -> None:
        for event in self._decoder.decode(payload).events:
            match event:
                case _Stored():
                    self._store(event)
                case _Removed():
                    self._remove(event)
                case _Cleared():
                    self._copies.clear()
                    self._lost.clear()

    def _store(self, event: _Stored) -> None:
        parent = _ROOT
        if event.parent_block_hash is not None:
            found = self._digests.get(event.parent_block_hash)
            if found is None:
                return  # blocks whose parent we never saw are of an unknown layer
            parent = found
        for i, key in enumerate(event.block_hashes):
            tokens = event.token_ids[i * event.block_size : (i + 1) * event.block_size]
            parent = self._digests[key] = chain_digest(parent, tokens)
            self._copies[key] += 1
            if key in self._lost:
                self._lost.remove(key)
                self.tally.again[self._layer(key)] += 1
            self.tally.stored[self._layer(key)] += 1

    def _remove(self, event: _Removed) -> None:
        for key in event.block_hashes:
            if key not in self._copies:
                continue  # an orphan
            self._copies[key] -= 1
            if self._copies[key] == 0:
                del self._copies[key]
                self._lost.add(key)
                self.tally.evicted[self._layer(key)] += 1

    def _layer(self, key: int | bytes) -> SourceLayer:
        return self.known.get(self._digests[key], SourceLayer.GENERATION)


def layers_of(
    tokens: Sequence[int], layers: Sequence[SourceLayer], size: int = BLOCK
) -> Iterable[tuple[Digest, SourceLayer]]:
    """The layer of each full block; of two in one block the more precious, as in the graph."""
    for number, digest in enumerate(chain_of(tokens, size)):
        yield digest, min(layers[number * size : (number + 1) * size])


def chain_of(tokens: Sequence[int], size: int = BLOCK) -> list[Digest]:
    """Identifies each full block of a prompt."""
    chain, digest = list[Digest](), _ROOT
    for start in range(0, len(tokens) - size + 1, size):
        digest = chain_digest(digest, tokens[start : start + size])
        chain.append(digest)
    return chain


_SOURCES: Final = "vllm:prompt_tokens_by_source_total"
_SERVED: Final = "vllm:request_inference_time_seconds"


@dataclass(frozen=True, slots=True)
class OwnCounts:
    """Since the server's start."""

    sources: dict[str, float]  # prompt tokens by where they came from
    # seconds of a request from being scheduled to its last token, by the engine's clock; NaN
    # before the first one's end
    mean_served_s: float


def own_counts(url: str) -> OwnCounts:
    """What the server of one engine at ``url`` counted; raises as ``parse_counts``."""
    return parse_counts(httpx.get(f"{url}/metrics", timeout=10.0, trust_env=False).text)


def parse_counts(page: str) -> OwnCounts:
    samples = [one for family in text_string_to_metric_families(page) for one in family.samples]
    by_name = {one.name: one.value for one in samples}
    if missing := {_SOURCES, f"{_SERVED}_sum", f"{_SERVED}_count"} - by_name.keys():
        raise ServerError(f"vLLM's page of metrics has no {', '.join(sorted(missing))}")
    sources = {one.labels["source"]: one.value for one in samples if one.name == _SOURCES}
    requests = by_name[f"{_SERVED}_count"]
    return OwnCounts(sources, by_name[f"{_SERVED}_sum"] / requests if requests else math.nan)
