"""What runs in vLLM's API process: refuses requests held too long, if an operator asks for that.

``refusal`` is middleware that vLLM is given by name; nothing else here is imported by an engine.
"""
