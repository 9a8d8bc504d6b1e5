"""What one sampled step shows, from where it is measured to the words that are said of it."""

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

# Measures of one sampled step: how sure the model was, where a request looked, and what the
# blocks there say. On a GPU all of it is queued, and nothing waits for it.

_AT_ONCE: Final = 4  # blocks embedded per sampled step; chosen
_CENTRE_OF: Final = 32  # blocks whose mean is taken for what all keys share; chosen
_WIDEST: Final = 4096  # values of an embedding that the wire takes
_REQUESTS: Final = 1024  # whose embedded blocks are remembered; chosen


class Look(NamedTuple):
    """A layer's decode query, as its attention got it.

    Attributes:
        layer: Place of the layer in the cache.
        query: [query heads, dims], rotated.
        scale: What its logits are multiplied with.
    """

    layer: int
    query: Tensor
    scale: float


def sureness(cache: PagedKv, logits: Tensor, spans: Sequence[slice]) -> Tensor:
    """How sure the model is of each of some rows' next token: float32 [rows], beside the logits.

    Args:
        cache: Says where the measuring is done.
        logits: [all rows, vocabulary].
        spans: Which rows, in the order of the result.
    """
    if cache.memory.is_cuda:
        rows = torch.cat([logits[span] for span in spans]).to(torch.float32)
        return score_of(ops.observer(cache).confidence(rows))
    found = [host_confidence(logits[span]) for span in spans]
    return score_of(Confidence(*map(torch.cat, zip(*found, strict=True))))


def attended(cache: PagedKv, looks: Sequence[Look], blocks: Tensor, tokens: int) -> Tensor:
    """Each block's share of the attention, averaged over layers.

    Args:
        blocks: int64 [n], the request's, in their order, where the cache is.
        tokens: That the query sees.

    Returns:
        float32 [n], where the cache is.
    """
    backend, table = ops.observer(cache), blocks[None]
    lengths = ops.brought(cache, torch.tensor([tokens]))
    masses = [
        backend.attention_mass(cache, look.layer, look.query[None], table, lengths, look.scale)[0]
        for look in looks
    ]
    return torch.stack(masses).mean(0)


class Meanings:
    """Embeds blocks: by their mean key in the middle layer, less what all blocks' keys share.

    The mean of the first blocks is taken for the latter; nothing is told before. Without that, all
    blocks of a model would be near to each other.

    Args:
        cache: The engine's.
        rope: How the model rotates keys; None: not at all.
    """

    def __init__(self, cache: PagedKv, rope: Rope | None) -> None:
        self._cache = cache
        # Where the cache is: to bring the angles there each time would wait for the GPU.
        self._rope = rope and replace(rope, inv_freq=ops.brought(cache, rope.inv_freq))
        self._layer = cache.layout.layers // 2
        self._sum: Tensor | None = None
        self._seen = 0
        self._told: OrderedDict[str, set[int]] = OrderedDict()  # request → places of its blocks

    def choose(self, request_id: str, blocks: Tensor, mass: Tensor) -> tuple[Tensor, Tensor] | None:
        """Embed the most attended full blocks that were not told yet of this request.

        Args:
            blocks: int64 [n], full blocks of the request.
            mass: float32 [n], where the cache is, as the blocks are.

        Returns:
            Places in ``blocks``, int64 [k], and their mean keys, float32 [k, dim], where the cache
            is; None if there is no block to embed.
        """
        told = [place for place in self._told.get(request_id, ()) if place < len(blocks)]
        count = min(_AT_ONCE, len(blocks) - len(told))
        if count <= 0:
            return None
        if told:
            behind = torch.zeros(len(blocks))
            behind[told] = -2.0  # a share is within [0, 1]
            mass = mass + ops.brought(self._cache, behind)
        places = torch.topk(mass, count).indices
        keys = block_meanings(self._cache, self._layer, blocks[places], places, self._rope)
        if keys.shape[1] > _WIDEST:
            keys = keys.reshape(count, self._cache.layout.heads, -1).mean(1)
        return places, keys

    def tell(
        self, request_id: str, places: Tensor, keys: Tensor
    ) -> tuple[tuple[int, ...], Tensor | None]:
        """What may be told of blocks that ``choose`` chose, now in host memory.

        Returns:
            Places, and float16 [places, dim]; no places and None while the mean is not known.
        """
        if self._sum is None:
            self._sum = torch.zeros_like(keys[0])
        if self._seen < _CENTRE_OF:
            self._sum += keys.sum(0)
            self._seen += len(places)
            return (), None
        told = self._told.setdefault(request_id, set())
        told.update(places.tolist())
        self._told.move_to_end(request_id)
        if len(self._told) > _REQUESTS:
            self._told.popitem(last=False)
        return tuple(places.tolist()), (keys - self._sum / self._seen).to(torch.float16)


# What was measured, on its way from where it was measured to host memory.


class ReadBack:
    """Tensors that are copied to host memory behind all that was queued; nobody waits for them.

    Args:
        tensors: On one GPU, or in host memory, where they have arrived at once.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tuple(tensor.to("cpu", non_blocking=True) for tensor in tensors)
        self._fence: Fence = mark(tensors[0].device)

    def arrived(self) -> bool:
        """Whether they are there; asks the driver, never waits."""
        return self._fence.event is None or bool(self._fence.event.query())

    def tensors(self) -> tuple[Tensor, ...]:
        """In the order in which they were given; only once they arrived."""
        return self._tensors


# What a worker says of a sampled step, and how it travels to the scheduler with its output.


@dataclass(frozen=True, slots=True)
class Sample:
    """One request on one sampled decode step.

    Attributes:
        request_id: vLLM's.
        confidence: How sure the model was of the next token, in [0, 1].
        mass: Little-endian float32, each block's share of the attention, from the prompt's first
            block on; empty where no layer was sampled.
        places: Which of its blocks have an embedding here.
        dim: Width of an embedding.
        vectors: Float16 ``[places, dim]``.
    """

    request_id: str
    confidence: float
    mass: bytes = b""
    places: tuple[int, ...] = ()
    dim: int = 0
    vectors: bytes = b""


@dataclass
class SampledMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Samples, beside what else the worker answers."""

    samples: list[Sample] = field(default_factory=list)
    answer: KVConnectorWorkerMetadata | None = None

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """What two workers say, as vLLM puts them together."""
        theirs, samples = told_apart(other)
        answers = [each for each in (self.answer, theirs) if each is not None]
        both = answers[0].aggregate(answers[1]) if len(answers) == 2 else next(iter(answers), None)
        return SampledMetadata([*self.samples, *samples], both)


def with_samples(output: KVConnectorOutput | None, samples: list[Sample]) -> KVConnectorOutput:
    """A step's output with ``samples`` beside what it says already."""
    output = output or KVConnectorOutput()
    output.kv_connector_worker_meta = SampledMetadata(samples, output.kv_connector_worker_meta)
    return output


def told_apart(
    metadata: KVConnectorWorkerMetadata | None,
) -> tuple[KVConnectorWorkerMetadata | None, list[Sample]]:
    """What else a worker answered, and its samples."""
    if isinstance(metadata, SampledMetadata):
        return metadata.answer, metadata.samples
    return metadata, []


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
