"""Runs in vLLM's API process: ``learning`` reads chat templates, ``chats`` marks the layers of
rendered chats, and ``refusal`` is optional middleware.
"""
