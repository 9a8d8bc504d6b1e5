"""Frames between an engine and the sidecar.

A message is three frames: ``b"KVG" + version``, the sender's sequence number (8 bytes, big endian),
and a MessagePack payload: an ``EventBatch`` to the sidecar, one advice message to the engine.
Decoding is typed, so that every message is either well formed or refused; only the events that are
refused, or of an unknown newer kind, are lost.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Sequence
from typing import Annotated, Any, Final, NamedTuple

import msgspec

from ..errors import VersionError, WireError
from .advice import (
    AdmissionAdvice,
    AdmissionMessage,
    AnyAdvice,
    AnyMessage,
    EvictionRanking,
    RankingMessage,
)
from .events import KINDS, MAX_EVENTS, RESIDENCY, AnyEvent, Event, EventBatch, Unreadable

BAD_PAYLOAD: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError)
"""Errors that decoding may raise; malformed text and deep nesting raise others than msgspec's."""

_PATH: Final = re.compile(r" - at `\$(?P<steps>[^`]*)`$")
_STEP: Final = re.compile(r"\[(\d+|\.\.\.)\]|\.(\w+)")


def refusal(error: BaseException, kind: type[msgspec.Struct]) -> str:
    """Describe why decoding a message of type ``kind`` failed: the field, and what is allowed."""
    text = str(error) or type(error).__name__
    found = _PATH.search(text)
    if found is None:
        return f"{kind.__name__}: {text}"
    return f"{kind.__name__}{_field(kind, found['steps'])}: {text[: found.start()]}"


def _field(kind: type[msgspec.Struct], steps: str) -> str:
    """Translate msgspec's positions, as ``[1][0][3]``, to names, as ``.field[0].field``."""
    path, here = "", kind
    for position, name in _STEP.findall(steps):
        within = _struct_in(here)
        if name or within is None or not position.isdigit():
            path += f".{name}" if name else f"[{position}]"
            here = _type_of(within, name) if within is not None and name else _item(here)
            continue
        tagged = within.__struct_config__.tag is not None
        fields = msgspec.structs.fields(within)
        place = int(position) - tagged
        if not 0 <= place < len(fields):
            return path
        path += f".{fields[place].name}"
        here = fields[place].type
    return path


def _struct_in(kind: Any) -> Any:
    """``kind`` if it is a message type, else None."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind
    return None


def _type_of(kind: Any, name: str) -> Any:
    return next((f.type for f in msgspec.structs.fields(kind) if f.name == name), None)


def _item(kind: Any) -> Any:
    """The type of a list's or tuple's items."""
    inner = [each for each in typing.get_args(kind) if each is not Ellipsis]
    if typing.get_origin(kind) in (typing.Annotated, typing.Union, types.UnionType):
        return _item(inner[0])
    return inner[0] if inner else None


VERSION: Final = 1
HEADER: Final = b"KVG" + bytes([VERSION])
MAX_FRAME_BYTES: Final = 64 << 20  # chosen
MAX_SEQ: Final = (1 << 63) - 1

_encoder = msgspec.msgpack.Encoder()
_events = msgspec.msgpack.Decoder(EventBatch)
_event: msgspec.msgpack.Decoder[AnyEvent] = msgspec.msgpack.Decoder(AnyEvent)
_advice: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode_events(seq: int, events: list[AnyEvent]) -> list[bytes]:
    return _frames(seq, _encoder.encode(EventBatch(events)))


def encode_advice(seq: int, advice: AnyAdvice, now: float) -> list[bytes]:
    message: AnyMessage
    match advice:
        case EvictionRanking():
            message = RankingMessage.of(advice, now)
        case AdmissionAdvice():
            message = AdmissionMessage.of(advice, now)
        case _:
            message = advice
    return _frames(seq, _encoder.encode(message))


class EventMessage(NamedTuple):
    """One message of an engine, as far as it could be decoded."""

    seq: int
    events: list[AnyEvent]
    unknown: int = 0  # events skipped because this build does not know their kind
    refused: str = ""  # why the first malformed event was refused; empty if none was
    # Whether a refused event reported where blocks are, so that a resync is needed.
    torn: bool = False


def decode_events(frames: Sequence[bytes]) -> EventMessage:
    """Decode a message; ``refused`` has a bad payload. Raises WireError or VersionError."""
    seq, payload = _unframe(frames)
    try:
        return EventMessage(seq, _events.decode(payload).events)
    except BAD_PAYLOAD:
        return _decode_singly(seq, payload)


def decode_advice(frames: Sequence[bytes], now: float) -> tuple[int, AnyAdvice]:
    """Decode one advice message, received at ``now``; returns its number and its content, dated by
    the receiver's clock. Raises as ``decode_events`` does.
    """
    seq, payload = _unframe(frames)
    try:
        message = _advice.decode(payload)
        if isinstance(message, RankingMessage | AdmissionMessage):
            return seq, message.at(now)
    except (*BAD_PAYLOAD, ValueError) as error:  # ValueError: keys that are not whole uint64s
        raise WireError(f"advice refused: {error}") from None
    return seq, message


class _RawBatch(msgspec.Struct, array_like=True):
    events: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=MAX_EVENTS)]


class _Head(msgspec.Struct, array_like=True):
    tag: int


_raw_events = msgspec.msgpack.Decoder(_RawBatch)
_head = msgspec.msgpack.Decoder(_Head)


def _decode_singly(seq: int, payload: bytes) -> EventMessage:
    """Decode event by event, after the batch as a whole did not decode."""
    try:
        raws = _raw_events.decode(payload).events
    except BAD_PAYLOAD as error:
        return EventMessage(seq, [], refused=f"no event batch: {error}", torn=True)
    events: list[AnyEvent] = []
    unknown, refused, torn = 0, "", False
    for raw in raws:
        try:
            events.append(_event.decode(raw))
        except BAD_PAYLOAD as error:
            kind = _kind_of(raw)
            if kind is None:
                unknown += 1
                continue
            refused = refused or refusal(error, kind)
            torn = torn or issubclass(kind, (Unreadable, *RESIDENCY))
    return EventMessage(seq, events, unknown, refused, torn)


def _kind_of(raw: msgspec.Raw) -> type[Event] | None:
    """The event's kind by its tag; None for an unknown kind."""
    try:
        return KINDS.get(_head.decode(raw).tag)
    except BAD_PAYLOAD:
        return Unreadable


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
    """Return a sequence number from its 8 big-endian bytes; refuses absurd ones."""
    if len(raw) != 8:
        raise WireError(f"a sequence number has 8 bytes, got {len(raw)}")
    seq = int.from_bytes(raw, "big")
    if seq > MAX_SEQ:
        raise WireError("sequence number out of range")
    return seq
