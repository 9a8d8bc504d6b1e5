"""The replay lab: what a policy would have bought on a trace, by the code that runs live.

Reads from below: ``traces`` and ``recordings``, eviction ``orders``, a simulated ``engine``,
``fast`` paths without time, the ``lab`` that makes tables of them, and users who wait for answers:
``closed``.
"""
