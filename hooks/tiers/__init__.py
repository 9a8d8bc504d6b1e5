"""Tiers below the engine's pool: WARM in host memory, COLD on disk. Nothing here knows vLLM.

The scheduler's process decides (``CopyDirectory``, ``JobBook``, ``TransferCosts``), each worker
moves bytes (``TierMover``), and the messages between them are in ``jobs``.
"""
