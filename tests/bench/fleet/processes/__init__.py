"""Processes of a fleet: routers, and stages in networks of their own."""
