"""Workloads of the replay lab that only benches play."""
