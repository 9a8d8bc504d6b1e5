"""What blocks are worth: scores from 0 to 1, and which of them always stay."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .aboutness import Shares
from .chat_blocks import Block
from .chat_session import ChatSession
from .memory_settings import MemorySettings


def scores(
    chat: ChatSession, blocks: Sequence[Block], about: Shares, looks: Shares, by: MemorySettings
) -> Shares:
    """float64 ``[blocks]`` from 0 to 1: similarity, recency and attention, and not below a block's
    floor.

    Args:
        about: How much each block is about what the user said last, from 0 to 1.
        looks: How much the model looks at each, from 0 to 1.
    """
    age = np.array([chat.turn - block.turn for block in blocks], dtype=np.float64)
    worth = by.similarity * about + by.recency * np.exp2(-age / by.half_life)
    worth = (1 - by.attention) * worth + by.attention * looks
    floors = [max(by.floors.get(block.source, 0.0), block.priority) for block in blocks]
    always = stays(chat, by)
    worth = np.maximum(worth, np.array(floors, dtype=np.float64))
    worth[[id(block) in always for block in blocks]] = 1.0
    return np.clip(worth, 0.0, 1.0)


def stays(chat: ChatSession, by: MemorySettings) -> set[int]:
    """``id`` of the blocks that never leave: the system's, the first, the newest, what is pinned.

    What stands behind the newest message of the user belongs to a turn under way, of which the
    last ``tail`` blocks stay.
    """
    system = [block for block in chat.blocks if block.source == "system"]
    spoken = [block for block in chat.blocks if block.source != "system"]
    asked = [block for block in spoken if block.source == "user"][-1:]
    pinned = [block for block in chat.blocks if block.pinned]
    newest = spoken[len(spoken) - by.tail :] if by.tail < len(spoken) else spoken
    return {id(block) for block in (*system, *spoken[: by.sinks], *asked, *newest, *pinned)}
