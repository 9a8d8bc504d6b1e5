"""The bench of what an engine pays: its parts, and that they measure what they name."""

from __future__ import annotations

import pytest
from kvgraph_bench.errors import BenchError
from kvgraph_bench.hotpath import run
from kvgraph_bench.steps.client_cost import measure_client
from kvgraph_bench.steps.scheduler_steps import EMPTY, Busy, measure_arms
from kvgraph_bench.steps.step_loop import Load

pytestmark = pytest.mark.usefixtures("vllm_loaded")


def test_a_part_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(BenchError, match=r"no part 'step' of this bench; there are all, pool"):
        run(part="step")


@pytest.mark.usefixtures("paper_config")  # which makes the model's configuration
def test_arms_take_turns_and_each_is_measured() -> None:
    arms = [EMPTY, "observed python", "tiers python"]
    took = measure_arms(Busy(2, 200), arms, rounds=2)
    assert list(took) == arms
    assert all(len(samples) == 2 and min(samples) > 0 for samples in took.values())


def test_the_client_is_measured_once_a_tick() -> None:
    took = measure_client(Load(4, 1_000), "python", steps=28)
    assert len(took) == 4
    assert min(took) > 0
