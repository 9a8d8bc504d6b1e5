"""Sees what happens to an engine's blocks and requests, and tells it as events. Changes nothing."""
