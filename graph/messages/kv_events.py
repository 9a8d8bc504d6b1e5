"""vLLM's own KV-event stream, decoded into our events.

Three shapes of a batch are in the wild: array of array events (older vLLM), array of map events
(vLLM 0.32) and map of map events. A publisher keeps to one, so a decoder is chosen by its first
good message. Prompt token ids and extra keys (which hold the cache salt) are never decoded.
Message format: https://docs.vllm.ai, ``vllm.distributed.kv_events``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np

from ..errors import WireError
from ..types import Tier
from .events import (
    AnyEvent,
    BlocksCleared,
    BlocksRemoved,
    BlocksSpilled,
    BlocksStored,
    CopiesDropped,
)
from .fields import MAX_NAME, BlockSize
from .wire import parse_seq

AnyHash = int | bytes
Hashes = list[AnyHash]


_MEDIUM_TIER: Final = {None: Tier.HOT, "GPU": Tier.HOT, "CPU": Tier.WARM, "STORAGE": Tier.COLD}


class _StoredMap(msgspec.Struct, tag="BlockStored", gc=False):
    block_hashes: Hashes
    parent_block_hash: AnyHash | None
    block_size: BlockSize
    medium: str | None = None
    session_id: str | None = None


class _RemovedMap(msgspec.Struct, tag="BlockRemoved", gc=False):
    block_hashes: Hashes
    medium: str | None = None


class _ClearedMap(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    pass


class _StoredArray(msgspec.Struct, tag="BlockStored", array_like=True, gc=False):
    block_hashes: Hashes
    parent_block_hash: AnyHash | None
    token_ids: msgspec.Raw
    block_size: BlockSize
    lora_id: msgspec.Raw = msgspec.Raw(b"\xc0")
    medium: str | None = None


class _RemovedArray(msgspec.Struct, tag="BlockRemoved", array_like=True, gc=False):
    block_hashes: Hashes
    medium: str | None = None


class _ClearedArray(msgspec.Struct, tag="AllBlocksCleared", array_like=True, gc=False):
    pass


_MapEvent = _StoredMap | _RemovedMap | _ClearedMap
_ArrayEvent = _StoredArray | _RemovedArray | _ClearedArray


class _ArrayOfArrays(msgspec.Struct, array_like=True):
    ts: float
    events: list[_ArrayEvent]


class _ArrayOfMaps(msgspec.Struct, array_like=True):
    ts: float
    events: list[_MapEvent]


class _MapOfMaps(msgspec.Struct):
    ts: float
    events: list[_MapEvent]


class _ArrayOfRaw(msgspec.Struct, array_like=True):
    ts: float
    events: list[msgspec.Raw]


class _MapOfRaw(msgspec.Struct):
    ts: float
    events: list[msgspec.Raw]


_BAD: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError)
_SHAPES: Final = (
    (_ArrayOfMaps, _ArrayOfRaw, _MapEvent),
    (_ArrayOfArrays, _ArrayOfRaw, _ArrayEvent),
    (_MapOfMaps, _MapOfRaw, _MapEvent),
)


class KvEventDecoder:
    """Decodes one publisher's messages, in the shape that its first good one had."""

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
        self.unknown_events = 0

    def decode(self, frames: Sequence[bytes]) -> tuple[int, list[AnyEvent]]:
        """Sequence number and events of one ``[topic, seq, payload]`` message.

        Events of an unknown tag are skipped and counted in ``unknown_events``.

        Raises:
            WireError: The message fits none of the known shapes.
        """
        if len(frames) != 3:
            raise WireError(f"a KV-event message has 3 frames, got {len(frames)}")
        return parse_seq(frames[1]), self.decode_payload(frames[2])

    def decode_payload(self, payload: bytes) -> list[AnyEvent]:
        """The events of one batch."""
        if self._chosen is not None:
            return self._decode_as(self._chosen, payload)
        error: Exception | None = None
        for shape in self._shapes:
            try:
                events = self._decode_as(shape, payload)
            except WireError as refused:
                error = error or refused
                continue
            if events:  # an empty batch, or one of unknown events only, fits several shapes
                self._chosen = shape
            return events
        raise error or WireError("KV-event batch refused")

    def _decode_as(self, shape: tuple[Any, Any, Any], payload: bytes) -> list[AnyEvent]:
        batch, raw, event = shape
        try:
            decoded = batch.decode(payload).events
        except _BAD as first:
            decoded = self._decode_singly(raw, event, payload, first)
        return [_translate(item) for item in decoded]

    def _decode_singly(self, raw: Any, event: Any, payload: bytes, first: Exception) -> list[Any]:
        """Decode event by event, so that one of a newer kind does not cost the others."""
        try:
            items = raw.decode(payload).events
        except _BAD:
            raise WireError(f"KV-event batch refused: {first}") from None
        known = []
        for item in items:
            try:
                known.append(event.decode(item))
            except _BAD as error:
                if "Invalid value" not in str(error):  # msgspec's wording for an unknown tag
                    raise WireError(f"KV event refused: {error}") from None
                self.unknown_events += 1
        return known


def _translate(event: _MapEvent | _ArrayEvent) -> AnyEvent:
    match event:
        case _StoredMap() | _StoredArray():
            tier, packed = _tier(event.medium), _pack(event.block_hashes)
            if tier is not Tier.HOT:
                return BlocksSpilled(packed, int(tier), 0)
            session = getattr(event, "session_id", None)
            parent = event.parent_block_hash
            return BlocksStored(
                packed,
                None if parent is None else _key(parent),
                event.block_size,
                session[:MAX_NAME] if session else None,
            )
        case _RemovedMap() | _RemovedArray():
            tier, packed = _tier(event.medium), _pack(event.block_hashes)
            return BlocksRemoved(packed) if tier is Tier.HOT else CopiesDropped(packed, int(tier))
        case _ClearedMap() | _ClearedArray():
            return BlocksCleared()


def _tier(medium: str | None) -> Tier:
    return _MEDIUM_TIER.get(medium, Tier.COLD)


def _key(value: AnyHash) -> int:
    key = int.from_bytes(value[-8:], "big") if isinstance(value, bytes) else value
    if not 0 <= key < 1 << 64:
        raise WireError("block hash out of range (0 to 2**64 - 1)")
    return key


def _pack(hashes: Hashes) -> bytes:
    try:
        return np.array(hashes, dtype="<u8").tobytes()
    except (TypeError, ValueError, OverflowError):
        return np.array([_key(value) for value in hashes], dtype="<u8").tobytes()
