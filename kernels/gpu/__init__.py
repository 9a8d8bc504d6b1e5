"""GPU-only code: calls and launches, copy engines, streams, and which way is fastest."""
