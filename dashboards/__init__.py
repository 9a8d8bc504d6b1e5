"""What a person looks at: the sidecar's HTTP surface and its metrics."""
