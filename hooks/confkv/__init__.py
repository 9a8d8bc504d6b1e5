"""``ConfKVCache``: a cache for transformers that keeps fewer tokens while the model is
confident.
"""
