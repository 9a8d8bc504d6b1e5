"""Turns workers' samples into events, in the scheduler's process."""

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

_MOST_ATTENDED: Final = 64  # most blocks reported per step; chosen
_REMEMBERED: Final = 1 << 16  # blocks whose embedding was reported; chosen


class SampleReporter:
    def __init__(
        self,
        group: ObservedGroup,  # the observed KV cache group
        running: Mapping[str, Scheduled],  # running requests by id
        emit: Callable[[AnyEvent | Later], None],  # takes each event; must not wait
    ) -> None:
        self._group, self._running, self._emit = group, running, emit
        self._embedded: dict[bytes, None] = {}  # hashes; read by the client's thread alone

    def take(self, samples: Iterable[Sample]) -> None:
        for sample in samples:
            if (known := self._running.get(sample.request_id)) is not None:
                hashes = self._group.hashes(known.request, known.request.num_computed_tokens)
                confidence = ConfidenceSampled(
                    b"",
                    sample.confidence,
                    sample.request_id[:MAX_NAME],
                    known.meaning.session,
                    known.meaning.tenant,
                )
                self._emit(LateSample(sample, hashes, confidence, self._embedded))


class LateSample:
    """A sample whose events are built when they are sent, on the client's thread."""

    __slots__ = ("_confidence", "_embedded", "_hashes", "_sample")

    def __init__(
        self,
        sample: Sample,
        hashes: Sequence[bytes],  # of the request's full blocks; must not change any more
        confidence: ConfidenceSampled,  # the confidence event, still without block keys
        embedded: dict[bytes, None],  # hashes of blocks whose embedding was reported already
    ) -> None:
        self._sample, self._hashes, self._confidence = sample, hashes, confidence
        self._embedded = embedded

    def events(self) -> Sequence[AnyEvent]:
        sure = msgspec.structs.replace(self._confidence, hashes=pack_hashes(self._hashes[-1:]))
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
        reported = [hashes[sample.places[at]] for at in fresh]
        self._embedded.update(dict.fromkeys(reported))
        while len(self._embedded) > _REMEMBERED:
            del self._embedded[next(iter(self._embedded))]
        return [BlocksEmbedded(pack_hashes(reported), sample.dim, vectors[fresh].tobytes())]
