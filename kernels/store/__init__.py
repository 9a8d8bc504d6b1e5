"""Where blocks lie outside an engine's cache: the arena in host memory, the file on disk."""
