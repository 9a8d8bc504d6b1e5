"""What a trace that names no sessions and has a coarse clock is read as."""

from __future__ import annotations

import numpy as np
from kvgraph.advisor.replay.reader import infer_sessions, spread_over_ticks


def test_requests_of_one_tick_are_laid_evenly_over_it() -> None:
    at = np.repeat(np.arange(20) * 3.0, 3)
    spread = spread_over_ticks(at)
    assert spread[:6].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert (np.diff(spread) > 0).all()


def test_a_tick_is_no_longer_than_the_clock_s_even_before_a_pause() -> None:
    at = np.repeat(np.append(np.arange(19) * 3.0, 300.0), 2)
    assert spread_over_ticks(at)[36:].tolist() == [54.0, 55.5, 300.0, 301.5]


def test_fine_or_irregular_times_are_what_they_are() -> None:
    rng = np.random.default_rng(3)
    for at in (
        np.sort(rng.uniform(0, 100, 200)),  # no clock
        np.repeat(np.arange(50) * 0.1, 4),  # bursts, on a fine one
        np.repeat(np.sort(rng.uniform(0, 500, 50)), 4),  # bursts at any time
        np.zeros(30),
        np.empty(0),
    ):
        assert spread_over_ticks(at) is at


def sessions(*chains: list[int]) -> list[int]:
    return infer_sessions(chains, [len(chain) for chain in chains], 100).tolist()


def test_an_edited_history_continues_its_session() -> None:
    assert sessions([1, 2], [1, 2, 3, 4], [1, 2, 3, 9, 10], [1, 2, 3, 9, 11]) == [0, 0, 0, 0]


def test_a_history_that_lost_half_or_more_is_a_new_session() -> None:
    assert sessions([1, 2, 3, 4], [1, 2, 9]) == [0, 1]


def test_strangers_behind_one_system_prompt_stay_strangers() -> None:
    assert sessions([1, 2, 3], [1, 4, 5], [1, 6, 7], [1, 4, 5, 8], [1]) == [0, 1, 2, 1, 3]
    assert sessions([1, 2, 3, 4, 5], [1, 2, 3, 9, 10], [1, 2, 3, 9, 10, 11]) == [0, 1, 1]
