"""kvgraph: a graph that knows what an LLM engine's KV cache is holding."""

__version__ = "0.1.0"
