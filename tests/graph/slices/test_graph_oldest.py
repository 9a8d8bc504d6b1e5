"""The longest unused of many rows: exactly those, however they are spread."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from kvgraph.graph.ingest.slices import oldest

_RNG = np.random.default_rng(3)
_SPREADS = {
    "even": _RNG.uniform(0, 1e6, 30_000),
    "equal": np.full(30_000, 7.0),
    "two": _RNG.integers(0, 2, 30_000).astype(np.float64),
    "batches": np.repeat(np.arange(30.0), 1_000),
    "never": np.where(_RNG.uniform(size=30_000) < 0.9, -np.inf, 5.0),
    "one apart": np.concatenate([np.full(29_999, 3.0), [1.0]]),
    "in step with the sample": np.tile(np.arange(8.0), 3_750),
}


@pytest.mark.parametrize("spread", _SPREADS)
def test_they_are_those_of_a_stable_sort(spread: str) -> None:
    times: npt.NDArray[np.float64] = _SPREADS[spread]
    rows = np.flatnonzero(_RNG.uniform(size=2 * len(times)) < 0.9)[: len(times)].astype(np.int32)
    cuts = [0, 11_000, 11_000, 29_000]
    parts = np.split(rows, cuts), np.split(times, cuts)
    for count in (0, 1, 100, 15_000, 29_999, 30_000):
        expected = np.sort(np.argsort(times, kind="stable")[:count])
        assert np.array_equal(oldest(*parts, count), rows[expected]), count
