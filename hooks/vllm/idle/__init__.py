"""An engine that has nothing to do, and takes no step by itself: it is woken for prefetch orders.

``loop_hook`` finds the loop that such an engine waits in, and ``idle_engine`` decides when to end
that wait.
"""
