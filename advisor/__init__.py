"""The sidecar: receives what engines do, keeps the graph, ranks, and publishes advice."""
