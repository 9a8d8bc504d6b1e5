"""What happens in vLLM's block pool, and which of its blocks holds which key.

``tap`` notes what the pool caches and evicts. ``index`` leads from keys to blocks, and
``found_blocks`` checks many at once; ``copy_marks`` says which are worth a copy. ``packed_hashes``
and ``returned`` belong to the notes; ``hash_probe`` says how blocks are hashed.
"""
