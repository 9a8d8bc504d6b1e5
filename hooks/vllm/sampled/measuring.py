"""Measures one sampled decode step and carries the results to the scheduler. On a GPU all measuring
is queued on the current stream, and nothing waits for it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.v1.outputs import KVConnectorOutput

from ....kernels import ops
from ....kernels.backends.attention import host_confidence, score_of
from ....kernels.backends.base import Confidence, block_meanings
from ....kernels.gpu.streams import Fence, mark

if TYPE_CHECKING:
    from ....kernels.layout import PagedKv
    from ....kernels.rope import Rope
    from ....kernels.tensors import Tensor

_AT_ONCE: Final = 4  # blocks embedded per sampled step; chosen
_CENTRE_OF: Final = 32  # blocks whose mean key is subtracted from all; chosen
_WIDEST: Final = 4096  # widest embedding that the wire accepts
_REQUESTS: Final = 1024  # requests whose embedded blocks are remembered; chosen


class LayerQuery(NamedTuple):
    """One layer's decode query for the sampled request."""

    layer: int  # index of the layer in the cache
    query: Tensor  # [query heads, dims], rotated
    scale: float  # factor of the attention logits


def confidence_scores(cache: PagedKv, logits: Tensor, spans: Sequence[slice]) -> Tensor:
    """Return the model's confidence in the next token for the rows of ``spans``, in order: float32
    [rows], from ``logits``, [all rows, vocabulary], on the logits' device. The cache's device
    selects the implementation.
    """
    if cache.memory.is_cuda:
        rows = torch.cat([logits[span] for span in spans]).to(torch.float32)
        return score_of(ops.observer(cache).confidence(rows))
    found = [host_confidence(logits[span]) for span in spans]
    return score_of(Confidence(*map(torch.cat, zip(*found, strict=True))))


def attended(cache: PagedKv, queries: Sequence[LayerQuery], blocks: Tensor, tokens: int) -> Tensor:
    """Return each block's share of the attention, averaged over layers: float32 [n], for a
    request's ``blocks`` in order, int64 [n] on the cache's device. The query attends to ``tokens``
    tokens.
    """
    backend, table = ops.observer(cache), blocks[None]
    lengths = ops.brought(cache, torch.tensor([tokens]))
    masses = [
        backend.attention_mass(cache, each.layer, each.query[None], table, lengths, each.scale)[0]
        for each in queries
    ]
    return torch.stack(masses).mean(0)


class BlockEmbedder:
    """Embeds blocks: a block's mean key in the middle layer, minus the mean over many blocks."""

    def __init__(self, cache: PagedKv, rope: Rope | None) -> None:
        self._cache = cache
        # On the cache's device, because copying the angles each time would wait for the GPU.
        self._rope = rope and replace(rope, inv_freq=ops.brought(cache, rope.inv_freq))
        self._layer = cache.layout.layers // 2
        self._sum: Tensor | None = None
        self._seen = 0
        self._reported: OrderedDict[str, set[int]] = OrderedDict()  # request → places of its blocks

    def choose(self, request_id: str, blocks: Tensor, mass: Tensor) -> tuple[Tensor, Tensor] | None:
        """Embed the request's most attended full blocks that were not reported yet. ``blocks``,
        int64 [n], are its blocks; ``mass``, float32 [n], their shares of the attention. Returns
        positions in ``blocks``, int64 [k], and mean keys, float32 [k, dim], on the cache's device;
        None if no block is left.
        """
        reported = [place for place in self._reported.get(request_id, ()) if place < len(blocks)]
        count = min(_AT_ONCE, len(blocks) - len(reported))
        if count <= 0:
            return None
        if reported:
            behind = torch.zeros(len(blocks))
            behind[reported] = -2.0  # below any share, which is within [0, 1]
            mass = mass + ops.brought(self._cache, behind)
        places = torch.topk(mass, count).indices
        keys = block_meanings(self._cache, self._layer, blocks[places], places, self._rope)
        if keys.shape[1] > _WIDEST:
            keys = keys.reshape(count, self._cache.layout.heads, -1).mean(1)
        return places, keys

    def report(
        self, request_id: str, places: Tensor, keys: Tensor
    ) -> tuple[tuple[int, ...], Tensor | None]:
        """Centre the embeddings that ``choose`` returned, and mark them as reported. Returns
        positions, and float16 [positions, dim]; no positions and None until the mean is known.
        """
        if self._sum is None:
            self._sum = torch.zeros_like(keys[0])
        if self._seen < _CENTRE_OF:
            self._sum += keys.sum(0)
            self._seen += len(places)
            return (), None
        reported = self._reported.setdefault(request_id, set())
        reported.update(places.tolist())
        self._reported.move_to_end(request_id)
        if len(self._reported) > _REQUESTS:
            self._reported.popitem(last=False)
        return tuple(places.tolist()), (keys - self._sum / self._seen).to(torch.float16)


@dataclass(frozen=True, slots=True)
class Sample:
    """What was measured for one request on one sampled decode step."""

    request_id: str  # vLLM's request id
    confidence: float  # the model's confidence in the next token, in [0, 1]
    # little-endian float32, each block's share of the attention, in prompt order; empty if no layer
    # was sampled
    mass: bytes = b""
    places: tuple[int, ...] = ()  # positions of the request's blocks that have an embedding here
    dim: int = 0  # width of an embedding
    vectors: bytes = b""  # float16 `[places, dim]`


@dataclass
class SampledMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    samples: list[Sample] = field(default_factory=list)
    answer: KVConnectorWorkerMetadata | None = None

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Merge the metadata of two workers, as vLLM asks."""
        theirs, samples = split_samples(other)
        answers = [each for each in (self.answer, theirs) if each is not None]
        both = answers[0].aggregate(answers[1]) if len(answers) == 2 else next(iter(answers), None)
        return SampledMetadata([*self.samples, *samples], both)


def with_samples(output: KVConnectorOutput | None, samples: list[Sample]) -> KVConnectorOutput:
    output = output or KVConnectorOutput()
    output.kv_connector_worker_meta = SampledMetadata(samples, output.kv_connector_worker_meta)
    return output


def split_samples(
    metadata: KVConnectorWorkerMetadata | None,
) -> tuple[KVConnectorWorkerMetadata | None, list[Sample]]:
    if isinstance(metadata, SampledMetadata):
        return metadata.answer, metadata.samples
    return metadata, []


_ROWS: Final = 8  # most requests whose confidence is measured per sampled step; chosen


class SampledRequest(NamedTuple):
    """What to measure of one request's attention."""

    queries: Sequence[LayerQuery]  # of the sampled layers; empty if only confidence is measured
    table: Tensor  # int [n], the request's blocks, in host memory or on the cache's device
    tokens: int  # tokens that the query attends to


class PendingMeasures(NamedTuple):
    """Measurements of one step, on their way to host memory."""

    names: Sequence[str]  # request ids, the one with sampled attention first
    # confidence scores; then, if attention was sampled, masses, positions and keys of blocks. In
    # host memory, valid only once they ``arrived``
    values: Sequence[Tensor]
    fence: Fence

    def arrived(self) -> bool:
        return self.fence.event is None or bool(self.fence.event.query())


class StepMeasurer:
    """Measures sampled steps of one engine, without waiting for the GPU."""

    def __init__(self, cache: PagedKv, rope: Rope | None) -> None:
        self._cache, self._embedder = cache, BlockEmbedder(cache, rope)

    def warm_up(self, vocabulary: int) -> None:
        """Measure zero queries, so that no sampled step initialises. Raises BuildError."""
        layout, device = self._cache.layout, self._cache.memory.device
        block = torch.zeros(1, dtype=torch.int64, device=device)
        query = torch.zeros(layout.heads, layout.key.dims, device=device)
        mass = attended(self._cache, [LayerQuery(0, query, 1.0)], block, layout.tokens)
        self._embedder.choose("", block, mass)
        confidence_scores(self._cache, torch.zeros(2, vocabulary, device=device), [slice(0, 2)])

    def begin(
        self, names: Sequence[str], logits: Tensor, row: int, sampled: SampledRequest
    ) -> PendingMeasures:
        """Queue the confidence of ``row`` and the rows after it, and the attention of ``row``."""
        spans = _from(row, len(names))
        values = [confidence_scores(self._cache, logits, spans), *self._seen(names[row], sampled)]
        chosen = [name for span in spans for name in names[span]]
        there = [value.to("cpu", non_blocking=True) for value in values]
        return PendingMeasures(chosen, there, mark(values[0].device))

    def _seen(self, request_id: str, sampled: SampledRequest) -> Sequence[Tensor]:
        """Return attention masses of the request's full blocks, and positions and keys of some."""
        if not sampled.queries:
            return ()
        size = self._cache.layout.tokens
        table = sampled.table[: -(-sampled.tokens // size)]
        blocks = ops.brought(self._cache, table.to(torch.int64))
        full = sampled.tokens // size
        mass = attended(self._cache, sampled.queries, blocks, sampled.tokens)[:full]
        return mass, *(self._embedder.choose(request_id, blocks[:full], mass) or ())

    def samples(self, measured: PendingMeasures) -> list[Sample]:
        sure, *sampled = measured.values
        samples = [Sample(*each) for each in zip(measured.names, sure.tolist(), strict=True)]
        if sampled:
            samples[0] = self._sample(samples[0], *sampled)
        return samples

    def _sample(self, sure: Sample, mass: Tensor, *embedded: Tensor) -> Sample:
        reported = self._embedder.report(sure.request_id, *embedded) if embedded else ((), None)
        places, vectors = reported
        return Sample(
            sure.request_id,
            sure.confidence,
            mass.numpy().tobytes(),
            places,
            0 if vectors is None else vectors.shape[1],
            b"" if vectors is None else vectors.numpy().tobytes(),
        )


def _from(first: int, count: int) -> list[slice]:
    """Return slices for ``first`` and the rows after it, wrapping around; ``_ROWS`` at most."""
    end = first + min(count, _ROWS)
    around = [slice(0, end - count)] if end > count else []
    return [slice(first, min(end, count)), *around]
