"""Recorded agent sessions, and the fleets made of them.

Reads sessions in the Weka format, and lays them over users who work in parallel.
"""
