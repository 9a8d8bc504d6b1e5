"""Frames between an engine and the sidecar.

A message is three frames: ``b"KVG" + version``, the sender's sequence number (8 bytes, big
endian), and a MessagePack payload: an ``EventBatch`` towards the sidecar, one advice message
towards the engine. Decoding is typed, so that what arrives is either meant or refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from .advice import AnyAdvice
from .errors import VersionError, WireError
from .events import AnyEvent, EventBatch

VERSION: Final = 1
HEADER: Final = b"KVG" + bytes([VERSION])
MAX_FRAME_BYTES: Final = 64 << 20
MAX_SEQ: Final = (1 << 63) - 1

_encoder = msgspec.msgpack.Encoder()
_events = msgspec.msgpack.Decoder(EventBatch)
_advice: msgspec.msgpack.Decoder[AnyAdvice] = msgspec.msgpack.Decoder(AnyAdvice)


def encode_events(seq: int, events: list[AnyEvent]) -> list[bytes]:
    """The frames that carry ``events`` as batch number ``seq``."""
    return _frames(seq, _encoder.encode(EventBatch(events)))


def encode_advice(seq: int, advice: AnyAdvice) -> list[bytes]:
    """The frames that carry one advice message as number ``seq``."""
    return _frames(seq, _encoder.encode(advice))


def decode_events(frames: Sequence[bytes]) -> tuple[int, list[AnyEvent]]:
    """Sequence number and events of one message.

    Raises:
        WireError: The frames are not a valid message; names what is wrong.
        VersionError: They are, in a protocol version that is not ours.
    """
    seq, payload = _unframe(frames)
    try:
        return seq, _events.decode(payload).events
    except _BAD_PAYLOAD as error:
        raise WireError(f"event batch refused: {error}") from None


def decode_advice(frames: Sequence[bytes]) -> tuple[int, AnyAdvice]:
    """Sequence number and content of one advice message; raises like ``decode_events``."""
    seq, payload = _unframe(frames)
    try:
        return seq, _advice.decode(payload)
    except _BAD_PAYLOAD as error:
        raise WireError(f"advice refused: {error}") from None


# msgspec reports malformed text and absurd nesting through errors that are not its own.
_BAD_PAYLOAD = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError)


def _frames(seq: int, payload: bytes) -> list[bytes]:
    return [HEADER, seq.to_bytes(8, "big"), payload]


def _unframe(frames: Sequence[bytes]) -> tuple[int, bytes]:
    if len(frames) != 3:
        raise WireError(f"a message has 3 frames, got {len(frames)}")
    header, seq_bytes, payload = frames
    if header != HEADER:
        if header[:3] == HEADER[:3] and len(header) == len(HEADER):
            raise VersionError(
                f"protocol version {header[3]} is not understood (this build speaks {VERSION})"
            )
        raise WireError("the first frame is not a kvgraph header")
    return parse_seq(seq_bytes), payload


def parse_seq(raw: bytes) -> int:
    """A sequence number from its 8 big-endian bytes; refuses other lengths and absurd values."""
    if len(raw) != 8:
        raise WireError(f"a sequence number has 8 bytes, got {len(raw)}")
    seq = int.from_bytes(raw, "big")
    if seq > MAX_SEQ:
        raise WireError("sequence number out of range")
    return seq
