"""In which order an engine should lose its blocks, and which copies it should have.

A policy scores (``policy``, ``scoring``), the rules bind every policy (``rules``, ``protection``),
chains stay whole. ``copy_worth`` says which blocks deserve a copy, ``candidates`` which copies
return.
"""
