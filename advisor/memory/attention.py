"""How closely each block relates to the user's message, and how much the model attends to it."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Final, Protocol
from urllib.parse import urlencode

import aiohttp
import bm25s
import msgspec
import numpy as np
import numpy.typing as npt
import orjson
from cachetools import FIFOCache, TLRUCache

from ...graph.wire.events import MAX_NAME
from ..fleet.upstream import AS_IT_IS, whole_answer
from ..process.process import RateLimitedLog
from ..tools.remote import BusySidecarError, RemoteError, UnknownError, ask
from .chat import Block, ChatSession

_WORDS: Final = r"(?u)\w+"
_WORD: Final = re.compile(_WORDS)
_LENGTH_COUNTS: Final = 0.3
"""BM25's ``b``, commonly 0.75. Chosen: blocks have two to thousands of words, and people do not
mention a file less because it is long.
"""
_TIMEOUT_S: Final = 30.0  # for an embedding endpoint; chosen
_MOST_VECTORS: Final = 20_000  # vectors to keep; chosen: 80 MB of 1,024 dimensions
_AT_ONCE: Final = 64  # texts per request; chosen: servers that limit the number allow as many
_LONGEST: Final = 8192  # characters of a text that are embedded; chosen: most windows are shorter

Shares = npt.NDArray[np.float64]
_Vector = npt.NDArray[np.float32]


class SimilarityError(Exception):
    """The server that compares texts did not answer, or its answer has no vectors."""


class Similarity(Protocol):
    """Compares blocks with a text."""

    async def of(self, said: str, blocks: Sequence[Block]) -> Shares:
        """Return how closely each of ``blocks`` relates to ``said``: float64 ``[blocks]``, each
        from 0 to 1. Raises SimilarityError.
        """
        ...

    async def close(self) -> None: ...


async def relevance_of(similarity: Similarity, said: str, blocks: Sequence[Block]) -> Shares:
    """Return how much each block adds about the topic of ``said``: float64 ``[blocks]``, from 0 to
    1.

    A block whose words are all in ``said``, such as the same question asked before, adds nothing.
    Raises SimilarityError.
    """
    shares = await similarity.of(said, blocks)
    like = np.flatnonzero(shares)
    texts = [blocks[number].text for number in like]
    shares[like] *= await asyncio.to_thread(_tells_more, said, texts)
    return shares


class WordSimilarity:
    """BM25 (Lucene's form) of the words of ``said``, as a share of ``said`` 's own score. Rare
    words weigh most; a block without any of the words gets 0.
    """

    async def of(self, said: str, blocks: Sequence[Block]) -> Shares:
        if not blocks or not said.strip():
            return np.zeros(len(blocks))
        return await asyncio.to_thread(_by_words, said, [block.text for block in blocks])

    async def close(self) -> None:
        pass


class EmbeddedSimilarity:
    """Cosine similarity of embeddings from an OpenAI-compatible API; negative values count as 0."""

    def __init__(
        self,
        url: str,  # the API, with its `/v1`
        model: str,  # the model's name there
        key: str | None = None,  # API key, if needed
        most: int = _MOST_VECTORS,  # vectors to keep, the most recently used ones
    ) -> None:
        headers = AS_IT_IS | ({"Authorization": f"Bearer {key}"} if key else {})
        self._url = f"{url.rstrip('/')}/embeddings"
        timeout = aiohttp.ClientTimeout(_TIMEOUT_S)
        self._session = aiohttp.ClientSession(
            headers=headers, timeout=timeout, auto_decompress=False
        )
        self._model = model
        self._vectors: FIFOCache[bytes, _Vector] = FIFOCache(most)  # by the digests of blocks

    async def of(self, said: str, blocks: Sequence[Block]) -> Shares:
        if not blocks:
            return np.zeros(0)
        keys = [b"".join(block.digests) for block in blocks]
        found = {key: self._vectors[key] for key in keys if key in self._vectors}
        new = {key: block.text for key, block in zip(keys, blocks, strict=True) if key not in found}
        asked, *vectors = await self._embed([said, *new.values()])
        found.update(zip(new, vectors, strict=True))  # others may have been given up meanwhile
        if {vector.shape for vector in found.values()} != {asked.shape}:
            self._vectors.clear()  # they are another model's
            raise SimilarityError("vectors of several lengths")
        self._vectors.update(found)
        return np.clip([float(found[key] @ asked) for key in keys], 0.0, 1.0)

    async def close(self) -> None:
        await self._session.close()

    async def _embed(self, texts: Sequence[str]) -> list[_Vector]:
        """Return embeddings of length 1, requested in batches."""
        found: list[_Vector] = []
        for at in range(0, len(texts), _AT_ONCE):
            some = [text[:_LONGEST] or " " for text in texts[at : at + _AT_ONCE]]
            body = {"model": self._model, "input": some}
            try:
                async with self._session.post(
                    self._url, json=body, raise_for_status=True, allow_redirects=False
                ) as answer:
                    found += _vectors(await whole_answer(answer), len(some))
            except (aiohttp.ClientError, TimeoutError) as error:
                raise SimilarityError(type(error).__name__) from None
        return found


def _vectors(answer: bytes, wanted: int) -> list[_Vector]:
    """Return an answer's embeddings; raises ``SimilarityError`` if it is malformed."""
    try:
        rows = sorted(orjson.loads(answer)["data"], key=lambda row: row["index"])
        vectors = [np.asarray(row["embedding"], dtype=np.float32) for row in rows]
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise SimilarityError(f"no embeddings: {type(error).__name__}") from None
    if len(vectors) != wanted:
        raise SimilarityError(f"{len(vectors)} embeddings of {wanted} texts")
    if any(vector.ndim != 1 or not np.isfinite(vector).all() for vector in vectors):
        raise SimilarityError("embeddings that are no vectors of numbers")
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
_MOST_BLOCKS: Final = 1000  # most blocks of one answer of the page
_MOST_S: Final = 1.0  # of one question; chosen: a client waits for it
_EVERY_S: Final = 1.0  # seconds between questions about one chat; chosen: samples change no faster
_SOON_S: Final = 0.1  # the same for a chat of which nothing was sampled yet; chosen
_MOST_CHATS: Final = 10_000  # chats whose last answer is kept; chosen
_WITHOUT_S: Final = 10.0  # until one that did not answer is asked again; chosen: a start takes that

_log = logging.getLogger(__name__)


class _Block(msgspec.Struct):
    attention: Annotated[float, msgspec.Meta(ge=0, le=1)]
    identity: str | None = None


class _Sampled(msgspec.Struct):
    blocks: list[_Block]


class SampledAttention:
    """Asks a sidecar's page for the attention that the engine sampled.

    If it does not answer, does not know the session, or has no samples for it, one log line is
    written, and every block's attention is 0.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._last: TLRUCache[str, Mapping[str, float]] = TLRUCache(  # by chats' keys
            _MOST_CHATS, lambda _, told, now: now + (_EVERY_S if told else _SOON_S), time.monotonic
        )
        self._asks_from = 0.0
        self._log = RateLimitedLog(_log, time.monotonic)
        self.told = 0  # how often it reported on a block that may leave

    async def of(self, chat: ChatSession, always: Collection[int]) -> Shares:
        """Return the model's attention to each of ``chat.blocks``: float64, from 0 to 1, the most
        that any block gets that may leave; ``always`` is the ``id`` of those that never do.
        """
        attention = await self._sampled(chat)
        found = np.array([attention.get(block.identity[:MAX_NAME], 0.0) for block in chat.blocks])
        leave = [block.place is not None and id(block) not in always for block in chat.blocks]
        most = float(found[leave].max(initial=0.0))
        if not most:
            return np.zeros(len(chat.blocks))
        self.told += 1
        return np.clip(found / most, 0.0, 1.0)

    async def _sampled(self, chat: ChatSession) -> Mapping[str, float]:
        """Return the attention by block name: the most that any of its engine blocks gets."""
        known = self._last.get(chat.key)
        if known is not None:
            return known
        asks = time.monotonic() >= self._asks_from
        attention = self._last[chat.key] = await self._ask(chat.name) if asks else {}
        return attention

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
        attention: dict[str, float] = {}
        for block in blocks:
            if block.identity is not None:
                attention[block.identity] = max(attention.get(block.identity, 0.0), block.attention)
        if not attention:
            self._warn("no block was sampled that has a name")
        return attention

    def _warn(self, kind: str, why: str = "") -> None:
        said = "the sidecar at %s does not tell where the model looks: %s (said once)"
        self._log.once(kind, said, self._url, why or kind)
