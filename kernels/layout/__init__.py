"""Where a token's K and V live, and which bytes lie side by side in two layouts.

One descriptor serves every paged cache and the arena; ``engines`` makes it from an engine's views.
"""
