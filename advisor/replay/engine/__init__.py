"""Simulated engines: a block pool, a waiting line, a tier below; and a router before several."""
