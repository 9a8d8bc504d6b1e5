"""What engine and sidecar exchange: events, advice, frames, endpoints and keys."""
