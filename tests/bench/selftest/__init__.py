"""``kvgraph selftest gpu``: every kernel on this machine's GPU, checked, timed, and reported."""
