"""Recall in a vLLM engine: loads copies of text that moved to another position. ``support`` says
which engines can have it, ``opt_in`` which requests get it, ``recall`` what is spliced, and
``own_text`` keeps approximate blocks out of vLLM's prefix cache.
"""
