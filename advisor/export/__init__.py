"""``kvgraph export``: what other tools can open: Perfetto, networkx and notebooks.

``happened`` and the API's graph are what is exported, so a live sidecar and a recording look alike.
"""
