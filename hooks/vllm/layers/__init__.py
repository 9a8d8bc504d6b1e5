"""Which source layer each part of a prompt belongs to, read off the borders of its messages.

The API process learns the borders from the chat template (``hooks.vllm.api``), and marks them
exactly where it knows the messages. Here is what the scheduler's process needs.
"""
