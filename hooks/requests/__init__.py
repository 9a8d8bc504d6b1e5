"""What a request is made of: hints, messages, layers, ends; nothing here knows an engine."""
