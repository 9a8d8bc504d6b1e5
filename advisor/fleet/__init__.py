"""Many engines as one: which of them a request goes to, and why.

One router decides for the replay lab and for the proxy (``kvgraph route``): it
costs each engine in seconds, sends later turns home, and counts with a reason whatever goes
elsewhere.
"""
