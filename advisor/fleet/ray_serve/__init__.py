"""Ray Serve's request router that is ours: the same object as in ``kvgraph route`` and the lab.

``request_router`` needs ``pip install 'kvgraph[ray]'``; nothing else in kvgraph imports it.
"""
