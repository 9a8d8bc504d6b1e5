"""Many engines as one: which of them a request goes to, and why.

One router decides for the replay lab, for the proxy (``kvgraph route``) and for Ray Serve: it
costs each engine in seconds, sends later turns home, and counts with a reason whatever goes
elsewhere.
"""
