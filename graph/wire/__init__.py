"""The messages between engine and sidecar: events, advice, frames, endpoints and keys."""
