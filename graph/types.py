"""The graph's vocabulary: source layers, tiers, edges, session states, block flags."""

from __future__ import annotations

from enum import IntEnum, IntFlag
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

# The low 64 bits of the engine's block hash. vLLM publishes the same 64 bits in its own KV events.
BlockKey = int
Keys = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.int32]

MAX_ENGINES: Final = 64
"""Most engines per sidecar: eight machines of eight ranks; chosen. Each has a residency column,
created when it connects.
"""

NO_ROW: Final = -1
NEVER: Final = float("-inf")  # a time before any other, since monotonic clocks may start below zero


class SourceLayer(IntEnum):
    """Where a block's tokens came from, from most to least precious."""

    AXIOMS = 0
    IDENTITY = 1
    RULES = 2
    CAPABILITIES = 3
    CONTEXT = 4
    MEMORIES = 5
    AFFECT = 6
    TOOL_RESULT = 7
    USER_TURN = 8
    GENERATION = 9


LAYER_NAMES: Final = tuple(layer.name.lower() for layer in SourceLayer)
LAYER_BY_NAME: Final = {layer.name.lower(): layer for layer in SourceLayer}
PROTECTED_LAYERS: Final = frozenset({SourceLayer.AXIOMS, SourceLayer.IDENTITY, SourceLayer.RULES})
MOST_SHARE: Final = 0.5
"""Most of a pool that may be protected unless an operator sets another share: the other half still
serves callers that protect nothing. Chosen.
"""
DEFAULT_IMPORTANCE: Final = np.array(
    [1.0, 0.95, 0.9, 0.7, 0.5, 0.5, 0.4, 0.35, 0.3, 0.2], dtype=np.float32
)
"""Importance by layer, for blocks whose segment states none."""


@lru_cache(maxsize=16)
def layer_mask(layers: frozenset[SourceLayer]) -> npt.NDArray[np.bool_]:
    """Return whether each value of a block's layer byte is one of ``layers``, bool ``[256]``."""
    mask = np.zeros(256, dtype=np.bool_)
    mask[[int(layer) for layer in layers]] = True
    mask.flags.writeable = False
    return mask


IS_PROTECTED: Final = layer_mask(PROTECTED_LAYERS)


class Authority(IntEnum):
    """Who stated a block's layer; a higher value takes precedence."""

    INFERRED = 0
    CALLER = 1
    OPERATOR = 2


class Tier(IntFlag):
    """Where copies of a block are, as bit flags."""

    NONE = 0
    HOT = 1
    WARM = 2
    COLD = 4
    POOL = 8  # the store that engines share, as far as this engine knows


HELD: Final = int(Tier.HOT | Tier.WARM | Tier.COLD)
"""An engine's own tiers; a block only in POOL is held by no engine."""


class EdgeType(IntEnum):
    """How two nodes are related; each comment gives source → target."""

    PREFIX_SHARE = 0  # parent block → child block
    CO_ATTEND = 1  # block – block, stored with the smaller row first
    SEMANTIC = 2  # block – block, stored with the smaller row first
    TEMPORAL = 3  # block → next block
    SPILL_LINK = 4  # block → its COPY
    MEMORY_REF = 5  # block → MEMORY


EDGE_NAMES: Final = tuple(edge.name.lower() for edge in EdgeType)


class StopReason(IntEnum):
    """Why a session's last answer ended."""

    UNKNOWN = 0
    TOOL_CALL = 1  # a tool is running; its result starts the next turn
    END_OF_TURN = 2  # a person is reading the answer
    TRUNCATED = 3  # it was cut at a length limit; whether it continues is unknown


class SessionState:
    """What a session is doing; plain integers, which numpy compares 50 times as fast as an enum."""

    IDLE: Final = 0  # between turns
    RUNNING: Final = 1  # one of its requests is in the engine
    WAITING_FOR_TOOL: Final = 2  # paused, with an expected return
    ENDED: Final = 3


STATE_NAMES: Final = ("idle", "running", "waiting_for_tool", "ended")


class BlockFlag(IntFlag):
    """Boolean facts about a block."""

    NONE = 0
    SUPERSEDED = 1  # only an abandoned branch of its session used it
    SHARED = 2  # more than one session walked it
    EMBEDDED = 4  # the semantic index holds its embedding


_WIRE: Final = np.dtype("<u8")


def as_keys(values: list[int] | bytes | Keys) -> Keys:
    """Return block keys as a uint64 array; ``bytes`` are little-endian uint64, as on the wire."""
    if isinstance(values, bytes):
        return np.frombuffer(values, _WIRE)
    return np.asarray(values, dtype=np.uint64)
