"""The HTTP API of the page."""
