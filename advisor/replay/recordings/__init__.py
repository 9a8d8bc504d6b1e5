"""Recorded agent sessions, and the fleets that they make.

Reads them in the Weka format and lays them over users who work in parallel.
"""
