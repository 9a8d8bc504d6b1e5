"""The sidecar's end of ``POST /v1/intents``, and its clients in agent frameworks."""
