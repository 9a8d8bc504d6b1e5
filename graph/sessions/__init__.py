"""Sessions: which come back, when, and by what evidence.

Holds the session table, what pauses tell, and how long tools take. Blocks name their session by a
row of this table.
"""
