"""Runs in vLLM's API process.

``learning`` renders test conversations to learn a chat template's borders and end marks, ``chats``
marks the layers of rendered chats, and ``refusal`` is optional middleware that refuses requests
held too long.
"""
