"""How processes on one machine find and wake each other.

Addresses that both ends accept, the notes that running sidecars leave for others of their user,
and a wake-up for a loop that sleeps in poll.
"""
