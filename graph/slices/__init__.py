"""Long work on the tables, cut into slices: between two of them others may read.

``event_runs`` cuts what engines report, ``ghosts`` forgets what left long ago. A table's own long
work is its ``tidying``. The tables are whole after each slice.
"""
