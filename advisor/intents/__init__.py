"""The sidecar's end of ``POST /v1/intents``, and a client of it for agent frameworks."""
