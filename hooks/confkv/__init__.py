"""``ConfKVCache``, a cache for transformers that keeps longest what a model is confident about."""
