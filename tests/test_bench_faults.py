"""The faults of ``kvgraph bench faults``, in short: each runs, and finds what it looks for."""

from __future__ import annotations

import random

from kvgraph.bench.faults_mutants import apply_mutants


def test_typed_mutants_harm_no_graph() -> None:
    seed = random.randrange(1 << 30)
    done = apply_mutants(seed, 12_000)
    assert done["crashes"] == 0, f"seed {seed}"
    assert done["applied"] > 2_000, "a quarter still decodes: what it means is checked, too"
    assert done["unknown"] > 0
