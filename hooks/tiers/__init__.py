"""Tiers below the engine's pool: WARM host memory, COLD disk. Nothing here knows vLLM.

The scheduler's process decides (``CopyDirectory``, ``JobBook``, ``TransferCosts``), each worker
moves bytes (``TierMover``), and the messages between them are in ``jobs``.
"""
