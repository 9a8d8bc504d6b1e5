"""``kvgraph bench kernels``: what moving KV costs, beside copying and beside computing it again."""
