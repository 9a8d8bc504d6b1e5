"""Decodes vLLM's own KV-event stream into our events.

Batches occur in three shapes: array of array events (older vLLM), array of map events (vLLM 0.32)
and map of map events. A publisher uses one of them, so a decoder is chosen by its first readable
message. Prompt token ids and extra keys (which hold the cache salt) are never decoded. Message
format: https://docs.vllm.ai, ``vllm.distributed.kv_events``.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
import numpy as np

from ..errors import WireError
from ..types import Tier
from .events import (
    MAX_KEYS,
    MAX_NAME,
    AnyEvent,
    BlocksCleared,
    BlocksRemoved,
    BlocksSpilled,
    BlocksStored,
    CopiesDropped,
)
from .frames import BAD_PAYLOAD, parse_seq

# A single byte of a batch can be an unreadable event, or a hash, which takes a thousand times as
# long to process as a byte. So a limit on the frame's length is not enough. Chosen: an engine with
# blocks of one token evicts as many as a step computes.
MOST_EVENTS: Final = 1 << 18
MOST_HASHES: Final = MAX_KEYS  # in all events of a batch

AnyHash = int | bytes
Hashes = Annotated[list[AnyHash], msgspec.Meta(max_length=MOST_HASHES)]
_Many = msgspec.Meta(max_length=MOST_EVENTS)

_MEDIA: Final = {
    **dict.fromkeys(("GPU", "DEVICE"), Tier.HOT),
    **dict.fromkeys(("CPU", "CPU_PINNED", "CPU_TIER1", "HOST", "HOST_PINNED"), Tier.WARM),
    **dict.fromkeys(("STORAGE", "DISK", "NVME", "FS", "CPU_TIER2"), Tier.COLD),
    **dict.fromkeys(("EXTERNAL", "NETWORK", "REMOTE", "SHARED"), Tier.POOL),
    **dict.fromkeys(("OBJ", "OBJECT_STORE", "SHARED_STORAGE"), Tier.POOL),
}
_FULL_ATTENTION: Final = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
_UNSTATED: Final = frozenset({None, "unknown"})
_LARGEST_BLOCK: Final = 65_535  # tokens
_UNKNOWN: Final = "Invalid value "  # how msgspec's words for a kind that is not known begin
_LONGEST_KIND: Final = 32  # characters of its name that are shown; chosen
_MOST_COUNTED: Final = 1 << 20  # hashes whose copies in the pool are counted; chosen


class _StoredMap(msgspec.Struct, tag="BlockStored", gc=False):
    block_hashes: Hashes
    parent_block_hash: AnyHash | None = None
    block_size: int | None = None  # of copies, where it may be omitted
    medium: str | None = None
    session_id: str | int | float | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    locality: str | None = None  # of a copy: where it lies, seen from the engine


class _RemovedMap(msgspec.Struct, tag="BlockRemoved", gc=False):
    block_hashes: Hashes
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class _ClearedMap(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    pass


class _StoredArray(msgspec.Struct, tag="BlockStored", array_like=True, gc=False):
    block_hashes: Hashes
    parent_block_hash: AnyHash | None
    token_ids: msgspec.Raw
    block_size: int | None
    lora_id: msgspec.Raw = msgspec.Raw(b"\xc0")
    medium: str | None = None
    lora_name: msgspec.Raw = msgspec.Raw(b"\xc0")
    extra_keys: msgspec.Raw = msgspec.Raw(b"\xc0")
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class _RemovedArray(msgspec.Struct, tag="BlockRemoved", array_like=True, gc=False):
    block_hashes: Hashes
    medium: str | None = None
    group_idx: int | None = None


class _ClearedArray(msgspec.Struct, tag="AllBlocksCleared", array_like=True, gc=False):
    pass


_MapEvent = _StoredMap | _RemovedMap | _ClearedMap
_ArrayEvent = _StoredArray | _RemovedArray | _ClearedArray
_Stored = _StoredMap | _StoredArray
_Removed = _RemovedMap | _RemovedArray
KvEvent = _MapEvent | _ArrayEvent
"""An event as the publisher sent it; see ``KvEventDecoder.translate``."""


# A batch's time is not read, so a missing or invalid one costs no events.


class _ArrayOfArrays(msgspec.Struct, array_like=True):
    ts: msgspec.Raw
    events: Annotated[list[_ArrayEvent], _Many]


class _ArrayOfMaps(msgspec.Struct, array_like=True):
    ts: msgspec.Raw
    events: Annotated[list[_MapEvent], _Many]


class _MapOfMaps(msgspec.Struct):
    ts: msgspec.Raw
    events: Annotated[list[_MapEvent], _Many]


class _ArrayOfRaw(msgspec.Struct, array_like=True):
    ts: msgspec.Raw
    events: Annotated[list[msgspec.Raw], _Many]


class _MapOfRaw(msgspec.Struct):
    ts: msgspec.Raw
    events: Annotated[list[msgspec.Raw], _Many]


_SHAPES: Final = (
    (_ArrayOfMaps, _ArrayOfRaw, _MapEvent),
    (_ArrayOfArrays, _ArrayOfRaw, _ArrayEvent),
    (_MapOfMaps, _MapOfRaw, _MapEvent),
)


class KvEventDecoder:
    """Decodes one publisher's messages, in the shape of its first readable one.

    Of an engine with several KV cache groups under the same hashes, only the first one with full
    attention is followed, as in our hooks: a match needs all of its blocks, whereas a windowed
    group drops blocks that a match does not need.
    """

    def __init__(self) -> None:
        self._shapes = [
            (
                msgspec.msgpack.Decoder(batch),
                msgspec.msgpack.Decoder(raw),
                msgspec.msgpack.Decoder(event),
            )
            for batch, raw, event in _SHAPES
        ]
        self._chosen: tuple[Any, Any, Any] | None = None
        self._group: tuple[int, int] | None = None  # its rank as a choice, and its number
        self._is_pool_known = False  # whether an event was about the pool
        self._copies: Counter[int] = Counter()  # the pool's blocks, by hash, as far as reported
        # Events skipped because they are malformed, have no meaning or are of an unknown kind; the
        # rest of their batch is used.
        self.left_out = 0
        self.last_left_out = ""  # why the last of them was skipped
        self.torn = False  # whether a skipped event may have been about blocks in the engine's pool

    def decode(self, frames: Sequence[bytes]) -> tuple[int, list[AnyEvent]]:
        """Decode ``[topic, seq, payload]`` into sequence number and events; raises WireError."""
        seq, events = self.read(frames)
        return seq, self.translate(events)

    def decode_payload(self, payload: bytes) -> list[AnyEvent]:
        return self.translate(self.read_payload(payload))

    def read(self, frames: Sequence[bytes]) -> tuple[int, list[KvEvent]]:
        """Decode a message without translating it, so that batches may arrive in any order."""
        if len(frames) != 3:
            raise WireError(f"a KV-event message has 3 frames, got {len(frames)}")
        return parse_seq(frames[1]), self.read_payload(frames[2])

    def read_payload(self, payload: bytes) -> list[KvEvent]:
        """Decode one batch without translating it."""
        if self._chosen is not None:
            return self._note(*_decode_as(self._chosen, payload))
        error: Exception | None = None
        best: tuple[list[KvEvent], list[str]] | None = None
        for shape in self._shapes:
            try:
                read = _decode_as(shape, payload)
            except WireError as refused:
                error = error or refused
                continue
            if best is None or len(read[0]) > len(best[0]):
                best = read
                # An empty batch, or one of unknown events only, fits several shapes.
                self._chosen = shape if read[0] else None
        if best is None:
            raise error or WireError("KV-event batch refused")
        return self._note(*best)

    def translate(self, events: Sequence[KvEvent]) -> list[AnyEvent]:
        """Translate events to our own; must be called in the publisher's order."""
        translated: list[AnyEvent] = []
        room = MOST_HASHES
        for event in events:
            room -= len(getattr(event, "block_hashes", ()))
            if room < 0:
                self._leave_out(f"its batch has more than {MOST_HASHES} block hashes", True)
                break
            try:
                translated.extend(self._translate(event))
            except WireError as error:
                # An unknown medium may be the pool's as long as no other name of it was seen.
                tier = _tier_of(event)
                is_pool = tier is Tier.HOT or (tier is None and not self._is_pool_known)
                self._leave_out(str(error), is_pool)
        return translated

    def forget(self) -> None:
        """Forget the pool's contents, which have become unknown."""
        self._copies.clear()

    def _note(self, events: list[KvEvent], bad: list[str]) -> list[KvEvent]:
        for reason in bad:
            self._leave_out(reason, True)
        return events

    def _leave_out(self, reason: str, torn: bool) -> None:
        self.left_out += 1
        self.last_left_out = reason
        self.torn |= torn

    def _translate(self, event: KvEvent) -> list[AnyEvent]:
        if isinstance(event, _ClearedMap | _ClearedArray):
            self._copies.clear()
            return [BlocksCleared()]
        tier = _tier(event)
        self._is_pool_known |= tier is Tier.HOT
        packed = _pack(event.block_hashes)
        if isinstance(event, _Removed):
            if not self._is_observed(event.group_idx):
                return []
            if tier is not Tier.HOT:
                return [CopiesDropped(packed, int(tier))]
            gone = self._last_copies(packed)
            return [BlocksRemoved(gone)] if gone else []
        if tier is not Tier.HOT:  # a copy is of a known block: its hash is enough
            known = self._is_observed(event.group_idx)
            return [BlocksSpilled(packed, int(tier), 0)] if known else []
        return self._stored(event, packed)

    def _stored(self, event: _Stored, packed: bytes) -> list[AnyEvent]:
        if event.block_size is None or not 1 <= event.block_size <= _LARGEST_BLOCK:
            raise WireError(
                f"BlockStored.block_size of a block on the GPU is {event.block_size}; "
                f"allowed: 1 to {_LARGEST_BLOCK}"
            )
        parent = event.parent_block_hash
        before = None if parent is None else _key(parent)
        session = getattr(event, "session_id", None)
        name = session[:MAX_NAME] if session and isinstance(session, str) else None
        translated: list[AnyEvent] = []
        if self._is_better(event):  # reports about its other groups no longer count
            self._copies.clear()
            translated.append(BlocksCleared())
        if self._is_observed(event.group_idx):
            self._count(packed, parent is not None)
            translated.append(BlocksStored(packed, before, event.block_size, name))
        return translated

    def _is_better(self, event: _Stored) -> bool:
        """Whether the event's KV cache group replaces the one followed so far."""
        number, kind = event.group_idx, event.kv_cache_spec_kind
        if number is None:
            return False
        group = (0 if kind in _FULL_ATTENTION else 1 if kind in _UNSTATED else 2, number)
        if self._group is not None and group >= self._group:
            return False
        changed = self._group is not None and self._group[1] != number
        self._group = group
        return changed

    def _is_observed(self, group: int | None) -> bool:
        return group is None or self._group is None or group == self._group[1]

    def _count(self, packed: bytes, counts_again: bool) -> None:
        """Count stored blocks by hash: a pool may hold several blocks with the same hash."""
        copies = self._copies
        for key in np.frombuffer(packed, "<u8").tolist():
            if key not in copies:
                if len(copies) < _MOST_COUNTED:
                    copies[key] = 1
            # vLLM may report the blocks that a request found once more, from its first one on: so a
            # hash at the start of a chain does not count again.
            elif counts_again:
                copies[key] += 1

    def _last_copies(self, packed: bytes) -> bytes:
        """Those of these hashes whose last block in the pool is removed."""
        gone: list[int] = []
        for key in np.frombuffer(packed, "<u8").tolist():
            left = self._copies.get(key, 1) - 1
            if left:
                self._copies[key] = left
            else:
                self._copies.pop(key, None)
                gone.append(key)
        return np.array(gone, dtype="<u8").tobytes()


def _decode_as(shape: tuple[Any, Any, Any], payload: bytes) -> tuple[list[KvEvent], list[str]]:
    """Decode a batch; returns events, and the reasons of those that cannot be read."""
    batch, raw, event = shape
    try:
        return batch.decode(payload).events, []
    except BAD_PAYLOAD as first:
        try:
            items = raw.decode(payload).events
        except BAD_PAYLOAD:
            raise WireError(f"KV-event batch refused: {first}") from None
    known: list[KvEvent] = []
    bad: list[str] = []
    for item in items:
        try:
            known.append(event.decode(item))
        except BAD_PAYLOAD as error:
            reason = str(error) or type(error).__name__
            if reason.startswith(_UNKNOWN):  # a newer kind, which may be about the pool
                kind = reason.removeprefix(_UNKNOWN).partition(" - at ")[0]
                reason = f"its kind is not known: {ascii(kind[:_LONGEST_KIND])[1:-1]}"
            bad.append(reason)
    return known, bad


def _tier(event: _Stored | _Removed) -> Tier:
    tier, medium = _tier_of(event), event.medium or ""
    if tier is None:
        allowed = ", ".join(_MEDIA)
        raise WireError(f"medium {medium[:32]!r} is not known; allowed: {allowed}")
    is_remote = tier is not Tier.HOT and getattr(event, "locality", None) == "REMOTE"
    return Tier.POOL if is_remote else tier


def _tier_of(event: KvEvent) -> Tier | None:
    """The tier of an event's medium; None if the medium is unknown."""
    medium = getattr(event, "medium", None)
    return Tier.HOT if medium is None else _MEDIA.get(medium.upper())


def _key(value: AnyHash) -> int:
    """A hash as unsigned 64 bits; some publishers send it signed (two's complement)."""
    key = int.from_bytes(value[-8:], "big") if isinstance(value, bytes) else value
    if not -(1 << 63) <= key < 1 << 64:
        raise WireError("block hash out of range (-2**63 to 2**64 - 1)")
    return key % (1 << 64)


def _pack(hashes: Hashes) -> bytes:
    if not any(isinstance(value, bytes) for value in hashes):  # numpy reads digits in them
        with contextlib.suppress(OverflowError):  # signed ones
            return np.array(hashes, dtype="<u8").tobytes()
    return np.array([_key(value) for value in hashes], dtype="<u8").tobytes()
