"""``kvgraph demo``: what a person sees first: the cliff, and what is found."""
