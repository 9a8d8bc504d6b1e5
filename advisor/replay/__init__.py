"""The replay lab: what a policy would have gained on a trace, computed by the code that runs live.

In order of dependence: ``traces`` and ``recordings``, eviction ``orders``, a simulated ``engine``,
``fast`` paths without simulated time, the ``lab`` that makes tables of them, and ``closed``: users
who wait for answers.
"""
