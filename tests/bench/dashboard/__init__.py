"""``kvgraph bench dashboard``: what page, logs and shadows cost, and how right they are."""
