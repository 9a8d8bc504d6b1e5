"""The trace formats that are read: what a line of each must have, and what it means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

import msgspec

from ..errors import TraceError

Tokens = Annotated[int, msgspec.Meta(ge=0, le=1 << 30)]
Time = Annotated[float, msgspec.Meta(ge=0, le=1e13)]
BlockHash = Annotated[int, msgspec.Meta(ge=0)]  # up to 2**64 - 1: msgspec's own bound
Name = Annotated[str, msgspec.Meta(max_length=1024)]
Return = Annotated[float, msgspec.Meta(ge=0, le=1e9)]  # s; the bound of the wire
Layers = Annotated[list[tuple[Name, Tokens, Tokens]], msgspec.Meta(max_length=1024)]


class Line(msgspec.Struct, omit_defaults=True):
    """One line of any format; the fields that it has tell which. None is as if it were absent."""

    # every format
    input_length: Tokens | None = None
    output_length: Tokens | None = None
    hash_ids: list[BlockHash] | None = None
    timestamp: Time | None = None  # ms; Qwen-Bailian: s
    # aiperf
    session_id: Name | int | None = None
    delay: Time | None = None  # ms after the end of the session's turn before
    # Qwen-Bailian
    chat_id: int | None = None
    parent_chat_id: int | None = None
    turn: int | None = None
    # our own
    kvgraph_trace: int | None = None
    block_size: Annotated[int, msgspec.Meta(ge=1, le=65_535)] | None = None
    at: Time | None = None  # s since the recording began
    session: Name | None = None
    output_hash_ids: list[BlockHash] | None = None
    ended: bool | None = None
    cached_tokens: Tokens | None = None
    seconds: Time | None = None  # that the request took
    # what a caller said: absent where nobody said anything
    waiting_for_tool: bool | None = None  # true: the answer ended in a tool call; false: the turn
    expected_return_s: Return | None = None  # after the end of the request
    layers: Layers | None = None  # (source layer, first token, end token)
    tenant: Name | None = None


@dataclass(frozen=True, slots=True)
class Format:
    """What lines of one format have in common.

    Attributes:
        block_size: Tokens a hash id stands for; None where the header says.
        unit: Seconds that one unit of ``timestamp`` is.
        timed: Whether each line says when it came; sessions without time stamps come as their
            answers let them.
        required: Fields without which a line means nothing.
        foreign: Fields that only lines of another format have.
    """

    name: str
    block_size: int | None
    unit: float
    required: tuple[str, ...]
    foreign: tuple[str, ...]
    timed: bool = True

    def check(self, line: Line) -> None:
        """Refuse a line of another format, and one that lacks a field.

        Raises:
            TraceError: Names the field.
        """
        for name in self.foreign:
            if getattr(line, name) is not None:
                raise TraceError(
                    f"{name} does not belong into a {self.name} trace: one file holds one format"
                )
        for name in self.required:
            if getattr(line, name) is None:
                raise TraceError(f"{name} is missing; a {self.name} line needs it")
        if self.timed and line.timestamp is None and line.at is None:
            raise TraceError(f"timestamp is missing; a {self.name} line needs it")


_SAID: Final = ("waiting_for_tool", "expected_return_s", "layers", "tenant")
_OURS: Final = ("kvgraph_trace", "block_size", "at", "session", *_SAID)
_BAILIAN: Final = ("chat_id", "parent_chat_id", "turn")
_AIPERF: Final = ("session_id", "delay")
_BODY: Final = ("input_length", "hash_ids")

MOONCAKE: Final = Format("mooncake", 512, 1e-3, _BODY, _OURS + _BAILIAN + _AIPERF)
AIPERF: Final = Format("aiperf", 512, 1e-3, (*_BODY, "session_id"), _OURS + _BAILIAN, timed=False)
BAILIAN: Final = Format("qwen-bailian", 16, 1.0, (*_BODY, "chat_id"), _OURS + _AIPERF)
RECORDED: Final = Format(
    "kvgraph", None, 1.0, (*_BODY, "at"), ("timestamp", *_BAILIAN, *_AIPERF, "kvgraph_trace")
)
HEADER_VERSION: Final = 1

# Not strict: exporters of tables write 1024.0 or "1024" where a column has a null.
_decoder: Final = msgspec.json.Decoder(Line, strict=False)


def decode_line(data: bytes) -> Line:
    """A line's fields, each within its bounds.

    Raises:
        TraceError: It is not JSON, or a field has a wrong type or value. Names the field only.
    """
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TraceError(str(error) or type(error).__name__) from None


def detect(first: Line) -> Format:
    """The format of the lines, by the first one.

    Raises:
        TraceError: No format fits.
    """
    if first.kvgraph_trace is not None:
        if first.kvgraph_trace != HEADER_VERSION or first.block_size is None:
            raise TraceError(
                f"kvgraph_trace = {first.kvgraph_trace}: allowed: {HEADER_VERSION}, with block_size"
            )
        return RECORDED
    if first.chat_id is not None:
        return BAILIAN
    if first.session_id is not None or first.delay is not None:
        return AIPERF
    if first.hash_ids is not None and first.timestamp is not None:
        return MOONCAKE
    raise TraceError(
        "no known trace format; allowed: mooncake (timestamp, input_length, output_length, "
        "hash_ids), aiperf (and session_id, delay), qwen-bailian (and chat_id, parent_chat_id, "
        "turn), kvgraph (what `kvgraph record` writes)"
    )
