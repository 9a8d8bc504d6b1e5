"""What runs in vLLM's API process: learns why answers end, refuses requests held too long.

``engine_marks`` is asked where an engine's configuration is made; it tries the chat template.
``refusal`` is middleware that vLLM is given by name, if an operator asks for that.
"""
