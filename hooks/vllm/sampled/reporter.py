"""Turns workers' samples into events, in the scheduler's process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
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
from ...link.outbox import LateEvents

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
        # hashes of blocks whose embedding was reported; read by the client's thread alone
        self._embedded: dict[bytes, None] = {}

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
                self._emit(LateEvents(partial(self._events, sample, hashes, confidence)))

    # Runs on the client's thread, when the events are sent; the hashes are of the request's full
    # blocks, and no longer change.

    def _events(
        self, sample: Sample, hashes: Sequence[bytes], confidence: ConfidenceSampled
    ) -> Sequence[AnyEvent]:
        sure = msgspec.structs.replace(confidence, hashes=pack_hashes(hashes[-1:]))
        return [sure, *_attended(sample, hashes), *self._embeddings(sample, hashes)]

    def _embeddings(self, sample: Sample, hashes: Sequence[bytes]) -> list[AnyEvent]:
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


def _attended(sample: Sample, hashes: Sequence[bytes]) -> list[AnyEvent]:
    mass = np.frombuffer(sample.mass, dtype="<f4")[: len(hashes)]
    if not len(mass):
        return []
    top = np.sort(np.argsort(-mass, kind="stable")[:_MOST_ATTENDED])
    keys = pack_hashes([hashes[place] for place in top.tolist()])
    return [BlocksAttended(keys, mass[top].tobytes())]
