"""The closed loop on vLLM's own scheduler above workers on paper, by a clock of its own."""
