"""Commands that look at a running sidecar, or at what one recorded."""
