"""How much a block is about what somebody says: from 0 to 1."""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final, Protocol

import bm25s
import httpx
import numpy as np
import numpy.typing as npt

from .chat_blocks import Block

_WORDS: Final = r"(?u)\w+"
_WORD: Final = re.compile(_WORDS)
_LENGTH_COUNTS: Final = 0.3
"""BM25's ``b``, commonly .75; chosen: blocks are from two to thousands of words long, and a file is
not spoken of less for being long."""
_TIMEOUT_S: Final = 30.0  # for an embedding endpoint; chosen
_MOST_VECTORS: Final = 20_000  # that are kept; chosen: 80 MB of 1,024 dimensions
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
    return shares * await asyncio.to_thread(_tells_more, said, [block.text for block in blocks])


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
    """

    def __init__(self, url: str, model: str, key: str | None = None) -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.AsyncClient(
            base_url=url, timeout=_TIMEOUT_S, trust_env=False, headers=headers
        )
        self._model = model
        self._vectors: OrderedDict[bytes, _Vector] = OrderedDict()  # by the digests of blocks

    async def of(self, said: str, blocks: Sequence[Block]) -> Shares:
        """See ``Similarity``; raises ``httpx.HTTPError`` where the endpoint does not answer."""
        if not blocks:
            return np.zeros(0)
        keys = [b"".join(block.digests) for block in blocks]
        new = {key: block.text for key, block in zip(keys, blocks, strict=True)
               if key not in self._vectors}  # fmt: skip
        asked, *vectors = await self._embed([said, *new.values()])
        self._vectors.update(zip(new, vectors, strict=True))
        found = np.array([float(self._vectors[key] @ asked) for key in keys])
        while len(self._vectors) > _MOST_VECTORS:
            self._vectors.popitem(last=False)
        return np.clip(found, 0.0, 1.0)

    async def close(self) -> None:
        """Close connections."""
        await self._client.aclose()

    async def _embed(self, texts: Sequence[str]) -> list[_Vector]:
        body = {"model": self._model, "input": [text[:_LONGEST] or " " for text in texts]}
        answer = await self._client.post("embeddings", json=body)
        answer.raise_for_status()
        try:
            rows = sorted(answer.json()["data"], key=lambda row: row["index"])
            vectors = [np.asarray(row["embedding"], dtype=np.float32) for row in rows]
        except (ValueError, TypeError, KeyError) as error:
            raise httpx.DecodingError(f"no embeddings: {type(error).__name__}") from None
        if len(vectors) != len(texts):
            raise httpx.DecodingError(f"{len(vectors)} embeddings of {len(texts)} texts")
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
