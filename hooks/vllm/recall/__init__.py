"""Recall in a vLLM engine: who asked for it, what is brought back, and what is kept apart.

``span_recall`` decides at each lookup what is spliced behind the exact prefix; ``exact_only`` keeps
what is approximate out of vLLM's prefix cache; ``recall_support`` says which engines can have it.
"""
