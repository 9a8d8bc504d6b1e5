"""Reads requests for any engine: hints, messages, layers of the prompt, and how answers end."""
