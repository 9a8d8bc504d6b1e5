"""``kvgraph bench policies``: hit rates of policies on recorded agents and on conversations."""
