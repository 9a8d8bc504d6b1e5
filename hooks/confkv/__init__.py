"""``ConfKVCache``: a cache for transformers that keeps fewer tokens of a confident model."""
