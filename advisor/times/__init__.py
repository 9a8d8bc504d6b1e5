"""Times for people: a sidecar's own clock as Unix seconds, and durations as they are spoken."""
