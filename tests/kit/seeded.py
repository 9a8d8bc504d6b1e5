"""Randomness that differs in each run."""

from __future__ import annotations

import random


def seeded() -> random.Random:
    """Of a seed that pytest shows when the test fails."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")  # noqa: T201
    return random.Random(seed)
