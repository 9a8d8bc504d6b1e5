"""KV cache groups of an engine whose layers differ, as its hello names them."""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated

import msgspec

from .fields import BlockSize, Count


class GroupKind(IntEnum):
    """What a KV cache group keeps of the tokens before the next one."""

    OTHER = 0  # nothing that a prefix match needs
    FULL = 1  # all of them
    WINDOW = 2  # the last ones
    CHUNK = 3  # those of the same chunk
    STATE = 4  # a state, as Mamba layers have


MAX_GROUPS = 255  # of one engine; chosen
GroupPlace = Annotated[int, msgspec.Meta(ge=0, lt=MAX_GROUPS)]


class CacheGroup(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Layers that share block tables in an engine whose layers differ."""

    kind: GroupKind
    window: Count  # tokens of the window or chunk; 0: it has none
    block_size: BlockSize
