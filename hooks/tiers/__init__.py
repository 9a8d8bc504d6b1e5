"""Tiers below the engine's pool: WARM in host memory, COLD on disk. The scheduler's process
decides, each worker moves bytes, and the messages between them are in ``jobs``. Nothing here
depends on vLLM.
"""
