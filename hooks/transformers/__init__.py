"""A KV cache for transformers' ``generate`` that keeps less while the model is sure of its words.

Reads the logits of each step, chooses how many tokens may stay, and evicts those that little
attention was paid to and that are old. Changes no weights. ``ConfKVCache`` is the way in.
"""
