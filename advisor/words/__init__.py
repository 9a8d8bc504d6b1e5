"""Turns reasons, waits, scores and times into sentences for people."""
