"""Makes events of what workers measured on sampled steps, in the scheduler's process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from ....graph.wire.events import (
    MAX_NAME,
    AnyEvent,
    BlocksAttended,
    BlocksEmbedded,
    ConfidenceSampled,
)
from ...keys import pack_hashes

if TYPE_CHECKING:
    from ...link.outbox import Later
    from ..groups import ObservedGroup
    from ..observer import Scheduled
    from .measuring import Sample

_MOST_ATTENDED: Final = 64  # blocks told of a step; chosen
_REMEMBERED: Final = 1 << 16  # blocks whose embedding was told; chosen


class SampleReporter:
    """Names the blocks of samples by their keys.

    Args:
        group: The observed KV cache group.
        running: Requests that run, by their ids.
        emit: Takes each event; must not wait.
    """

    def __init__(
        self,
        group: ObservedGroup,
        running: Mapping[str, Scheduled],
        emit: Callable[[AnyEvent | Later], None],
    ) -> None:
        self._group, self._running, self._emit = group, running, emit
        self._embedded: dict[bytes, None] = {}  # hashes; read by the client's thread alone

    def take(self, samples: Iterable[Sample]) -> None:
        """Queue what workers measured; of a request that is over, nothing is told."""
        for sample in samples:
            if (known := self._running.get(sample.request_id)) is not None:
                hashes = self._group.hashes(known.request, known.request.num_computed_tokens)
                said = ConfidenceSampled(
                    b"", sample.confidence, sample.request_id[:MAX_NAME],
                    known.meaning.session, known.meaning.tenant,
                )  # fmt: skip
                self._emit(LateSample(sample, hashes, said, self._embedded))


class LateSample:
    """A sample whose events are made when they are sent.

    Args:
        hashes: Of the request's full blocks; not changed any more.
        said: The rest of what is told of its confidence.
        embedded: Hashes whose embedding was told.
    """

    __slots__ = ("_embedded", "_hashes", "_said", "_sample")

    def __init__(
        self, sample: Sample, hashes: Sequence[bytes], said: ConfidenceSampled,
        embedded: dict[bytes, None],
    ) -> None:  # fmt: skip
        self._sample, self._hashes, self._said = sample, hashes, said
        self._embedded = embedded

    def events(self) -> Sequence[AnyEvent]:
        """Confidence, attention and embeddings, as far as they were sampled."""
        sure = msgspec.structs.replace(self._said, hashes=pack_hashes(self._hashes[-1:]))
        return [sure, *self._attended(), *self._embeddings()]

    def _attended(self) -> list[AnyEvent]:
        mass = np.frombuffer(self._sample.mass, dtype="<f4")[: len(self._hashes)]
        if not len(mass):
            return []
        top = np.sort(np.argsort(-mass, kind="stable")[:_MOST_ATTENDED])
        hashes = pack_hashes([self._hashes[place] for place in top.tolist()])
        return [BlocksAttended(hashes, mass[top].tobytes())]

    def _embeddings(self) -> list[AnyEvent]:
        sample, hashes = self._sample, self._hashes
        fresh = [
            at
            for at, place in enumerate(sample.places)
            if place < len(hashes) and hashes[place] not in self._embedded
        ]
        if not fresh:
            return []
        vectors = np.frombuffer(sample.vectors, dtype="<f2").reshape(-1, sample.dim)
        told = [hashes[sample.places[at]] for at in fresh]
        self._embedded.update(dict.fromkeys(told))
        while len(self._embedded) > _REMEMBERED:
            del self._embedded[next(iter(self._embedded))]
        return [BlocksEmbedded(pack_hashes(told), sample.dim, vectors[fresh].tobytes())]
