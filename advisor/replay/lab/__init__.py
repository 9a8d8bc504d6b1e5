"""Compares policies: arms by name, tables of cells, losses explained, weights tuned, priors
learned."""
