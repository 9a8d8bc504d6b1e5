"""What crosses the wire: events of engines, advice to them, frames, addresses and keys."""
