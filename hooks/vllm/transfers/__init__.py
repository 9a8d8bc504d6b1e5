"""Moves blocks between the engine's pool, host memory and disk.

``bridge`` decides in the scheduler's process, with a spiller, a loader and a prefetcher; ``worker``
and ``disk_file`` are the workers' end; ``rescue`` completes what was promised to vLLM before an
error of ours.
"""
