"""How samples travel beside what else workers answer."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from kvgraph.hooks.tiers.jobs import TierAnswer
from kvgraph.hooks.vllm.sampled.measuring import Sample, SampledMetadata, split_samples
from kvgraph.hooks.vllm.tiers.worker import TierWorkerMetadata

FIRST, SECOND = Sample("a", 0.5), Sample("b", 0.25)


@pytest.mark.parametrize("theirs_too", [False, True])
def test_samples_and_answers_of_two_workers_are_put_together(theirs_too: bool) -> None:
    other = SampledMetadata([SECOND], TierWorkerMetadata(TierAnswer()) if theirs_too else None)
    both = SampledMetadata([FIRST], TierWorkerMetadata(TierAnswer())).aggregate(other)
    answer, samples = split_samples(both)
    assert samples == [FIRST, SECOND]
    assert isinstance(answer, TierWorkerMetadata)
