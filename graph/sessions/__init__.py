"""Sessions: who is coming back, when, and what makes us think so.

The session table, what pauses tell, and how long tools take. Blocks name their session by a row of
this table.
"""
