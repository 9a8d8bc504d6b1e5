"""``LookedAt``: which of a chat's blocks the model looks at, as a sidecar's samples tell."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Annotated, Final, NamedTuple, Protocol
from urllib.parse import urlencode

import msgspec
import numpy as np

from ....graph.messages.fields import MAX_NAME
from ...remote import BusySidecarError, RemoteError, UnknownError, ask
from .aboutness import Shares
from .chat_session import ChatSession

_PATH: Final = "/v1/sampled"
_MOST_BLOCKS: Final = 1000  # of one answer: a page tells of no more
_MOST_S: Final = 1.0  # of one question; chosen: a client waits for it
_EVERY_S: Final = 1.0  # between questions about one chat; chosen: samples change no faster
_SOON_S: Final = 0.1  # between those about a chat of which nothing was sampled yet; chosen
_WITHOUT_S: Final = 10.0  # until one that did not answer is asked again; chosen: a start takes that

_log = logging.getLogger(__name__)


class Attention(Protocol):
    """Tells which blocks of a chat its model looks at."""

    @property
    def wants_names(self) -> bool:
        """Whether engines are to be told the names of blocks, by which samples are told."""
        ...

    async def of(self, chat: ChatSession, always: Collection[int]) -> Shares:
        """float64 ``[chat.blocks]``, from 0 to 1: 1 is what those that may leave get at most.

        Args:
            always: ``id`` of the blocks that never leave.
        """
        ...


class NoAttention:
    """Nobody tells."""

    wants_names = False

    async def of(self, chat: ChatSession, always: Collection[int]) -> Shares:
        """See ``Attention``; all are 0."""
        return np.zeros(len(chat.blocks))


class _Block(msgspec.Struct):
    attention: Annotated[float, msgspec.Meta(ge=0, le=1)]
    identity: str | None = None


class _Sampled(msgspec.Struct):
    blocks: list[_Block]


class _Told(NamedTuple):
    """What was told of a chat, by names, and until when nobody asks again."""

    looks: Mapping[str, float]
    until: float


class LookedAt:
    """Asks a sidecar's page what the engine's samples found.

    Where it does not answer, knows no such session, or nothing of it was sampled, the log says so
    once, and no block is looked at.

    Args:
        url: Of the page; its token is that of the sidecar's note, or the environment's.

    Attributes:
        told: How often it told of a block that may leave.
    """

    wants_names = True

    def __init__(self, url: str) -> None:
        self._url = url
        self._last: OrderedDict[str, _Told] = OrderedDict()  # by chats' keys, the oldest first
        self._asks_from = 0.0
        self._said: set[str] = set()
        self.told = 0

    async def of(self, chat: ChatSession, always: Collection[int]) -> Shares:
        """See ``Attention``."""
        looks = await self._looks(chat)
        found = np.array([looks.get(block.identity[:MAX_NAME], 0.0) for block in chat.blocks])
        leave = [block.place is not None and id(block) not in always for block in chat.blocks]
        most = float(found[leave].max(initial=0.0))
        if not most:
            return np.zeros(len(chat.blocks))
        self.told += 1
        return np.clip(found / most, 0.0, 1.0)

    async def _looks(self, chat: ChatSession) -> Mapping[str, float]:
        """The attention of a chat's blocks, by their names: of each the most that any of the
        engine's blocks gets."""
        now = time.monotonic()
        while self._last and next(iter(self._last.values())).until <= now:
            self._last.popitem(last=False)
        known = self._last.get(chat.key)
        if known is not None and known.until > now:
            return known.looks
        looks = await self._ask(chat.name) if now >= self._asks_from else {}
        self._last[chat.key] = _Told(looks, now + (_EVERY_S if looks else _SOON_S))
        self._last.move_to_end(chat.key)
        return looks

    async def _ask(self, session: str) -> dict[str, float]:
        path = f"{_PATH}?{urlencode({'session': session, 'limit': _MOST_BLOCKS})}"
        try:
            async with asyncio.timeout(_MOST_S):
                answer = await asyncio.to_thread(ask, self._url, path, _MOST_S)
            blocks = msgspec.convert(answer, type=_Sampled).blocks
        except UnknownError:
            self._warn("it knows no session of a chat's name")
            return {}
        except msgspec.ValidationError:
            self._warn("its page is another version's")
            return {}
        except BusySidecarError as busy:
            self._asks_from = time.monotonic() + busy.again_in_s
            return {}
        except (RemoteError, TimeoutError) as error:
            self._asks_from = time.monotonic() + _WITHOUT_S
            self._warn(type(error).__name__, str(error) or f"no answer within {_MOST_S:g} s")
            return {}
        looks: dict[str, float] = {}
        for block in blocks:
            if block.identity is not None:
                looks[block.identity] = max(looks.get(block.identity, 0.0), block.attention)
        if not looks:
            self._warn("no block was sampled that has a name")
        return looks

    def _warn(self, kind: str, why: str = "") -> None:
        if kind not in self._said:
            self._said.add(kind)
            _log.warning("the sidecar at %s does not tell where the model looks: %s (said once)",
                         self._url, why or kind)  # fmt: skip
