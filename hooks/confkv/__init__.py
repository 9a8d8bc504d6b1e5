"""``ConfKVCache``: a cache for transformers that keeps fewer tokens while the model is confident.

``cache`` is the public class and follows the model's logits, ``attention`` runs attention over a
layer, ``layer`` scores and evicts a layer's tokens, and ``stores`` hold keys and values.
"""
