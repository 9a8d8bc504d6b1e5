"""Types of the fields of messages, with the bounds that are checked when one is read."""

from __future__ import annotations

from typing import Annotated

import msgspec

MAX_NAME = 256  # characters of any name; chosen
Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
Plain = Annotated[str, msgspec.Meta(max_length=64, pattern=r"^[ -~]*\Z")]  # safe in a log line
MAX_KEYS = 1 << 20  # per list; chosen
Hashes = Annotated[bytes, msgspec.Meta(max_length=8 * MAX_KEYS)]
Hash = Annotated[int, msgspec.Meta(ge=0)]  # up to 2**64 - 1: the wire's own bound
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]
Total = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]  # counted since a start: never too big
PoolSize = Annotated[int, msgspec.Meta(ge=0, le=1 << 24)]  # blocks; ten times the largest pools
Listing = Annotated[bytes, msgspec.Meta(max_length=8 * 7 * (1 << 20))]  # 7.3 M keys fit a frame
BlockSize = Annotated[int, msgspec.Meta(ge=1, le=65_535)]  # tokens
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Rate = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
Unit = Annotated[float, msgspec.Meta(ge=0, le=1)]
