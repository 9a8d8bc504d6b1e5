"""Many engines as one: one router, for the replay lab and ``kvgraph route``, decides which of them
a request goes to, and counts why.
"""
