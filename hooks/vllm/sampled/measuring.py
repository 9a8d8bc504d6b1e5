"""What one sampled step shows, from where it is measured to the words that are said of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from ....kernels import ops
from .looks import Look, Meanings, attended, sureness
from .read_back import ReadBack
from .sample_words import Sample

if TYPE_CHECKING:
    from ....kernels.layout.layout import PagedKv
    from ....kernels.maths.rope import Rope
    from ....kernels.tensors import Tensor

_ROWS: Final = 8  # requests whose confidence is taken per sampled step; chosen


class Looked(NamedTuple):
    """Where one request's query looked.

    Attributes:
        looks: Of some layers; none, if only confidence is taken.
        table: int [n], the request's blocks, in host memory or where the cache is.
        tokens: That the query sees.
    """

    looks: Sequence[Look]
    table: Tensor
    tokens: int


class Measured(NamedTuple):
    """What was measured, on its way.

    Attributes:
        names: Requests, the one that was looked at first.
        values: Their confidence; and, where it looked, masses, places and keys of blocks.
    """

    names: Sequence[str]
    values: ReadBack


class Measuring:
    """Measures steps of one engine. On a GPU all is queued, and nothing waits for it.

    Args:
        cache: Its paged memory.
        rope: How keys are rotated; None: not at all.
    """

    def __init__(self, cache: PagedKv, rope: Rope | None) -> None:
        self._cache, self._meanings = cache, Meanings(cache, rope)

    def warm_up(self, vocabulary: int) -> None:
        """Measure made queries once, so that no step waits for what the first measure takes.

        Raises:
            BuildError: The cache is on a GPU, and its kernels cannot be compiled.
        """
        layout, device = self._cache.layout, self._cache.memory.device
        block = torch.zeros(1, dtype=torch.int64, device=device)
        query = torch.zeros(layout.heads, layout.key.dims, device=device)
        mass = attended(self._cache, [Look(0, query, 1.0)], block, layout.tokens)
        self._meanings.choose("", block, mass)
        sureness(self._cache, torch.zeros(2, vocabulary, device=device), [slice(0, 2)])

    def begin(self, names: Sequence[str], logits: Tensor, row: int, looked: Looked) -> Measured:
        """Measure how sure the model is of ``row`` and of those behind it, and what ``row`` sees.

        Args:
            names: Requests, by row.
            logits: [rows, vocabulary].
        """
        spans = _from(row, len(names))
        values = [sureness(self._cache, logits, spans), *self._seen(names[row], looked)]
        return Measured([name for span in spans for name in names[span]], ReadBack(values))

    def _seen(self, request_id: str, looked: Looked) -> Sequence[Tensor]:
        """Masses of the request's full blocks, and places and keys of some of them."""
        if not looked.looks:
            return ()
        size = self._cache.layout.tokens
        table = looked.table[: -(-looked.tokens // size)]
        blocks = ops.brought(self._cache, table.to(torch.int64))
        full = looked.tokens // size
        mass = attended(self._cache, looked.looks, blocks, looked.tokens)[:full]
        return mass, *(self._meanings.choose(request_id, blocks[:full], mass) or ())

    def samples(self, measured: Measured) -> list[Sample]:
        """What is said of what arrived."""
        sure, *looked = measured.values.tensors()
        samples = [Sample(*each) for each in zip(measured.names, sure.tolist(), strict=True)]
        if looked:
            samples[0] = self._sample(samples[0], *looked)
        return samples

    def _sample(self, sure: Sample, mass: Tensor, *embedded: Tensor) -> Sample:
        told = self._meanings.tell(sure.request_id, *embedded) if embedded else ((), None)
        places, vectors = told
        return Sample(
            sure.request_id, sure.confidence, mass.numpy().tobytes(), places,
            0 if vectors is None else vectors.shape[1],
            b"" if vectors is None else vectors.numpy().tobytes(),
        )  # fmt: skip


def _from(first: int, count: int) -> list[slice]:
    """``first`` and the rows behind it, around the end, ``_ROWS`` at most."""
    end = first + min(count, _ROWS)
    around = [slice(0, end - count)] if end > count else []
    return [slice(first, min(end, count)), *around]
