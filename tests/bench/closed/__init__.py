"""``kvgraph bench agents --closed``: users who wait for answers, below the cliff and past it."""
