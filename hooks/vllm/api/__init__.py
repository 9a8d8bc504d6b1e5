"""What runs in vLLM's API process: it may refuse who waits too long, when an operator asks for
that.

``refusal`` is middleware that vLLM is given by name; nothing else here is imported by an engine.
"""
