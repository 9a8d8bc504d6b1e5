"""The threads that move copies: between pool and memory, to and from a disk, to and from a store.

A lane hangs without holding up another; ``AnswerWatch`` notices it.
"""
