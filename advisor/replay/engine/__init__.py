"""Simulated engines: a block pool, a waiting queue, a tier below; and a router before several."""
