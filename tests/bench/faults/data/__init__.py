"""Faults of what is told and kept: mutants, lost events, torn snapshots, random traffic."""
