"""Commands that query a running sidecar or a recording."""
