"""Decides in which order an engine should evict its blocks, and which copies it should have.

A policy scores (``policy``, ``formulas``, ``scoring``), the rules bind every policy (``rules``,
``protection``), and chains stay whole. ``copy_worth`` says which blocks deserve a copy,
``candidates`` which copies return.
"""
