"""Times of GPU work, by CUDA events, taken in turns so that all meet the machine in one state."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch

Action = Callable[[], object]

ROUNDS: Final = (3, 15)  # at least, at most
SECONDS: Final = 0.4  # that the rounds of one comparison may take together, about
# The device spins while work is queued, so that what is timed is the device alone. Beyond this
# long a queue (loops of thousands of launches) the host's time is part of the result.
_LONGEST_SPIN: Final = 0.05
_CYCLES: Final = 2.1e9  # a second, at least as fast as any clock


@dataclass
class Times:
    """Samples of one action.

    Attributes:
        device_us: From the first of its work to the last, on the device.
        host_us: What queueing it took on the host.
    """

    device_us: list[float] = field(default_factory=list)
    host_us: list[float] = field(default_factory=list)


def time_in_turns(
    actions: dict[str, Action], rounds: tuple[int, int] = ROUNDS, seconds: float = SECONDS
) -> dict[str, Times | None]:
    """Samples of each action; None for one that did not fit the GPU's memory.

    An action whose attribute ``on_host`` is true does a part of its work on the host before the
    device can begin: it is timed from an idle device.
    """
    costs = {name: cost_of(action) for name, action in actions.items()}
    fitting = {name: cost for name, cost in costs.items() if cost is not None}
    whole = sum(both[0] for both in fitting.values())
    count = int(max(rounds[0], min(rounds[1], seconds / max(whole, 1e-6))))
    times: dict[str, Times | None] = {
        name: Times() if name in fitting else None for name in actions
    }
    for _ in range(count):
        for name, (_, queueing) in fitting.items():
            hidden = None if getattr(actions[name], "on_host", False) else queueing
            device, host = once(actions[name], hidden)
            taken = times[name]
            assert taken is not None
            taken.device_us.append(device * 1e6)
            taken.host_us.append(host * 1e6)
    return times


def once(action: Action, queueing: float | None = None) -> tuple[float, float]:
    """Seconds on the device and seconds of queueing.

    Args:
        queueing: What queueing is known to take: hidden behind a spin; None starts from idle.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    if queueing is not None and queueing < _LONGEST_SPIN:
        torch.cuda._sleep(int((2 * queueing + 50e-6) * _CYCLES))
    start.record()
    began = time.perf_counter()
    action()
    queued = time.perf_counter() - began
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3, queued


def cost_of(action: Action) -> tuple[float, float] | None:
    """Whole seconds and queueing, of the second time: the first compiles and measures."""
    cost: Any = None
    try:
        for _ in range(2):
            torch.cuda.synchronize()
            began = time.perf_counter()
            action()
            queued = time.perf_counter() - began
            torch.cuda.synchronize()
            cost = time.perf_counter() - began, queued
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
        return None
    return cost  # type: ignore[no-any-return]
