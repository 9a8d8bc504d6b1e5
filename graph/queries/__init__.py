"""Answers questions that people ask of the graph, and changes nothing.

Why a block ranks where it does and what stands near it is in ``views``, how much of everything
there is in ``stats``.
"""
