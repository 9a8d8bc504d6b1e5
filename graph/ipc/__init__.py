"""How processes on one machine find and wake each other.

Holds the addresses that both ends accept, the notes that running sidecars leave for other processes
of their user, and a wake-up for a loop that sleeps in poll.
"""
