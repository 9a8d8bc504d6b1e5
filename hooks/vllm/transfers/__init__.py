"""Moves blocks between the engine's pool, host memory and disk.

``bridge`` decides in the scheduler's process, with a spiller, a loader and a prefetcher;
``worker`` and ``disk_file`` are the workers' end; ``rescue`` keeps promises to vLLM after an error
of ours.
"""
