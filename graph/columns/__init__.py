"""What tables are made of; nothing here knows what a row means.

``columns`` declares arrays, ``row_pool`` hands out rows that are reused, ``hash_index`` finds rows
by 64-bit keys, ``interner`` gives strings numbers, and ``whole_chains`` lowers scores along chains
of rows.
"""
