"""``kvgraph diff``: two recordings, or two stretches of time, beside each other."""
