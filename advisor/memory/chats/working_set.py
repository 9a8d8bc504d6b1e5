"""Which blocks leave a prompt, and which come back."""

from __future__ import annotations

import numpy as np

from .aboutness import Shares
from .block_scores import scores, stays
from .chat_blocks import Block
from .chat_session import ChatSession
from .memory_settings import MemorySettings, Mode


def evict(
    chat: ChatSession, about: Shares, looks: Shares, by: MemorySettings, until: int
) -> list[Block]:
    """Let the blocks that are worth least leave, until the prompt takes ``until`` tokens at most.

    Args:
        about, looks: float64 ``[chat.blocks]``: see ``scores``.
    """
    worth = scores(chat, chat.blocks, about, looks, by)
    always = stays(chat, by)
    gone: list[Block] = []
    taken = chat.tokens
    for number in np.argsort(worth, kind="stable"):  # of equals, the oldest first
        if taken <= until:
            break
        block = chat.blocks[int(number)]
        if block.place is not None and id(block) not in always:
            block.place = None
            taken -= block.tokens
            gone.append(block)
    return gone


def recall(chat: ChatSession, about: Shares, by: MemorySettings, room: int) -> list[Block]:
    """Let the blocks come back that a message is about, as long as there is room for them.

    They stand before the newest of the others: an engine splices what adjoins text that it holds,
    and does not hold the end of what it answered last. Those that are too short to be spliced stand
    behind, where they keep nothing else from being spliced.

    Args:
        about: float64 ``[chat.blocks]``: how much each is about the user's message.
        room: Tokens.
    """
    if by.mode is not Mode.KV_RESTORE:
        return []
    back: list[int] = []
    taken = 0
    for number in np.argsort(-about, kind="stable").tolist():
        block = chat.blocks[number]
        if taken == by.top or about[number] < by.least_similarity:
            break
        if block.turn == chat.turn:
            continue  # it is what was just said
        if block.place is not None:
            taken += by.resident_gate
        elif block.messages and block.tokens <= room:
            back.append(number)
            taken += 1
            room -= block.tokens
    found = [chat.blocks[number] for number in sorted(back)]
    long = [block for block in found if block.tokens >= by.shortest]
    newest = _newest(chat, by) if long else []
    for block in long:
        chat.enter(block)
    chat.move_behind(newest)
    for block in found:
        chat.enter(block)
    return found


def _newest(chat: ChatSession, by: MemorySettings) -> list[Block]:
    """The newest blocks of earlier turns that have ``settled`` tokens together, in their order.

    The system's and the chat's first are not among them; none are, if they are too long.
    """
    first = [block for block in chat.blocks if block.source != "system"][: by.sinks]
    fixed = {id(block) for block in first}
    newest: list[Block] = []
    for block in reversed(chat.resident):
        if sum(each.tokens for each in newest) >= by.settled:
            break
        if block.turn != chat.turn and block.source != "system" and id(block) not in fixed:
            newest.append(block)
    moved = sum(each.tokens for each in newest)
    return newest[::-1] if moved <= by.most_moved else []
