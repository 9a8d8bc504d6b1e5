"""The shared store of an engine: what goes there, what comes back, under which names.

``StoreBridge`` decides in the scheduler's process, with a ``StoreLookup``, which asks what the
store holds, and a ``Sharer``, which gives it blocks; ``worker_store`` is the workers' end.
"""
