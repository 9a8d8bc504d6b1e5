"""``kvgraph demo``: what a person sees first, the cliff and the agents, as tables and pictures."""
