"""What makes it a process: the end with its parent, snapshots, keys, logs, HTTP serving."""
