"""The sidecar's end of ``POST /v1/intents``; a client of it for agent frameworks, and LangGraph's."""
