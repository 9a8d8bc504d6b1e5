"""Many engines as one: which of them gets a request, for ``kvgraph route`` and the lab."""
