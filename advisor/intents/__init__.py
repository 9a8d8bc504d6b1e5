"""Clients of ``POST /v1/intents``, also for agent frameworks."""
