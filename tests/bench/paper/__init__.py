"""Engines on paper: vLLM's own scheduler above workers that note what was written."""
