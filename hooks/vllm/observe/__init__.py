"""Observes an engine's blocks and requests, and reports them as events. Changes nothing."""
