"""Faults of running processes: killed, stopped, flooded, cut off; a bad clock, a bad disk."""
