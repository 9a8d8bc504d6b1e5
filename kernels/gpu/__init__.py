"""What only a GPU runs: kernel calls and launches, copy engines, streams.

``measure`` finds out which method moves bytes fastest on this machine.
"""
