"""Moves blocks between the engine's pool, host memory and disk.

``bridge`` decides in the scheduler's process, with a spiller, a loader, a prefetcher and an
``idle_writer``; ``worker`` and ``disk_file`` are the workers' end; ``promises`` are the loads that
vLLM waits for; ``no_tiers`` stands where an engine has none of it.
"""
