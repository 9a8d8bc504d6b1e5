"""Workloads that are made, to a description of traffic: for what no recording shows."""
