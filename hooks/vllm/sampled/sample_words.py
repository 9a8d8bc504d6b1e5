"""What a worker says of a sampled step, and how it travels to the scheduler with its output."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.v1.outputs import KVConnectorOutput


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
