"""The replay lab: what a policy would have found on a trace, computed by the code that runs live.

Bottom up: ``reader`` reads a ``trace``, ``recorded_sessions`` is what fleets are made of; eviction
orders run in a ``simulator``, or in ``fast`` without simulated time; ``arms`` and ``tables``
compare them; ``closed`` plays users who wait for answers.
"""
