"""Fleets of simulated engines behind a router: what a home, a shared store and an order find."""
