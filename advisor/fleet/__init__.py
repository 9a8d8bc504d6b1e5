"""Many engines as one: a router, used by the replay lab and ``kvgraph route``, decides which engine
gets a request, and counts the reasons.
"""
