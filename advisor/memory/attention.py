"""``LookedAt``: which of a chat's blocks the model looks at, as a sidecar's samples tell."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Final, NamedTuple, Protocol
from urllib.parse import urlencode

import bm25s
import httpx
import msgspec
import numpy as np
import numpy.typing as npt

from ...graph.wire.events import MAX_NAME
from ..tools.remote import BusySidecarError, RemoteError, UnknownError, ask
from .chat import Block, ChatSession

# How much a block is about what somebody says: from 0 to 1.

_WORDS: Final = r"(?u)\w+"
_WORD: Final = re.compile(_WORDS)
_LENGTH_COUNTS: Final = 0.3
"""BM25's ``b``, commonly .75; chosen: blocks are from two to thousands of words long, and a file is
not spoken of less for being long."""
_TIMEOUT_S: Final = 30.0  # for an embedding endpoint; chosen
_MOST_VECTORS: Final = 20_000  # that are kept; chosen: 80 MB of 1,024 dimensions
_AT_ONCE: Final = 64  # texts of one request; chosen: servers that bound their number allow as many
_LONGEST: Final = 8192  # characters of a text that are embedded; chosen: most windows are shorter

Shares = npt.NDArray[np.float64]
_Vector = npt.NDArray[np.float32]


class Similarity(Protocol):
    """Compares blocks with what somebody says."""

    async def of(self, said: str, blocks: Sequence[Block]) -> Shares:
        """float64 ``[blocks]``, each from 0 to 1."""
        ...

    async def close(self) -> None:
        """Give up connections."""
        ...


async def tells_of(similarity: Similarity, said: str, blocks: Sequence[Block]) -> Shares:
    """How much each block tells of what somebody speaks of: float64 ``[blocks]``, from 0 to 1.

    A block whose words are all in ``said``, such as the same question asked before, tells nothing.

    Raises:
        httpx.HTTPError: Similarity could not be asked for.
    """
    shares = await similarity.of(said, blocks)
    like = np.flatnonzero(shares)
    texts = [blocks[number].text for number in like]
    shares[like] *= await asyncio.to_thread(_tells_more, said, texts)
    return shares


class WordSimilarity:
    """BM25 (Lucene's form) of the words of ``said``, as a share of what ``said`` itself would get.

    Rare words weigh most; a block that has none of the words gets 0.
    """

    async def of(self, said: str, blocks: Sequence[Block]) -> Shares:
        """See ``Similarity``; another thread counts the words."""
        if not blocks or not said.strip():
            return np.zeros(len(blocks))
        return await asyncio.to_thread(_by_words, said, [block.text for block in blocks])

    async def close(self) -> None:
        """There is nothing to give up."""


class EmbeddedSimilarity:
    """Cosine of the vectors that an OpenAI-compatible ``/v1/embeddings`` gives; below 0 it is 0.

    Args:
        url: Of the API, with its ``/v1``.
        model: As that server calls it.
        key: Of its API, if it wants one.
        most: Vectors that are kept, the ones that were used last.
    """

    def __init__(
        self, url: str, model: str, key: str | None = None, most: int = _MOST_VECTORS
    ) -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.AsyncClient(
            base_url=url, timeout=_TIMEOUT_S, trust_env=False, headers=headers
        )
        self._model, self._most = model, most
        self._vectors: OrderedDict[bytes, _Vector] = OrderedDict()  # by the digests of blocks

    async def of(self, said: str, blocks: Sequence[Block]) -> Shares:
        """See ``Similarity``; raises ``httpx.HTTPError`` where the endpoint does not answer."""
        if not blocks:
            return np.zeros(0)
        keys = [b"".join(block.digests) for block in blocks]
        found = {key: self._vectors[key] for key in keys if key in self._vectors}
        new = {key: block.text for key, block in zip(keys, blocks, strict=True)
               if key not in found}  # fmt: skip
        asked, *vectors = await self._embed([said, *new.values()])
        found.update(zip(new, vectors, strict=True))  # others may have been given up meanwhile
        if {vector.shape for vector in found.values()} != {asked.shape}:
            self._vectors.clear()  # they are another model's
            raise httpx.DecodingError("vectors of several lengths")
        for key, vector in found.items():
            self._vectors[key] = vector
            self._vectors.move_to_end(key)
        while len(self._vectors) > self._most:
            self._vectors.popitem(last=False)
        return np.clip([float(found[key] @ asked) for key in keys], 0.0, 1.0)

    async def close(self) -> None:
        """Close connections."""
        await self._client.aclose()

    async def _embed(self, texts: Sequence[str]) -> list[_Vector]:
        """Vectors of length 1, a few at once."""
        found: list[_Vector] = []
        for at in range(0, len(texts), _AT_ONCE):
            some = [text[:_LONGEST] or " " for text in texts[at : at + _AT_ONCE]]
            body = {"model": self._model, "input": some}
            answer = await self._client.post("embeddings", json=body)
            answer.raise_for_status()
            found += _vectors(answer, len(some))
        return found


def _vectors(answer: httpx.Response, wanted: int) -> list[_Vector]:
    """What an endpoint answered; raises ``httpx.DecodingError`` where that is something else."""
    try:
        rows = sorted(answer.json()["data"], key=lambda row: row["index"])
        vectors = [np.asarray(row["embedding"], dtype=np.float32) for row in rows]
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise httpx.DecodingError(f"no embeddings: {type(error).__name__}") from None
    if len(vectors) != wanted:
        raise httpx.DecodingError(f"{len(vectors)} embeddings of {wanted} texts")
    if any(vector.ndim != 1 or not np.isfinite(vector).all() for vector in vectors):
        raise httpx.DecodingError("embeddings that are no vectors of numbers")
    return [vector / max(float(np.linalg.norm(vector)), 1e-9) for vector in vectors]


def _tells_more(said: str, texts: Sequence[str]) -> npt.NDArray[np.bool_]:
    words = _words_of(said)
    return np.array([not _words_of(text) <= words for text in texts], dtype=bool)


def _words_of(text: str) -> set[str]:
    return set(_WORD.findall(text.lower()))


def _by_words(said: str, texts: Sequence[str]) -> Shares:
    words: Any = bm25s.tokenize(
        [*texts, said], token_pattern=_WORDS, stopwords=None, return_ids=False, show_progress=False
    )
    if not words[-1] or not any(words[:-1]):
        return np.zeros(len(texts))
    index = bm25s.BM25(method="lucene", b=_LENGTH_COUNTS)
    index.index(words, show_progress=False)
    scores = np.asarray(index.get_scores(words[-1]), dtype=np.float64)
    shares: Shares = np.clip(scores[:-1] / max(scores[-1], 1e-9), 0.0, 1.0)
    return shares


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
