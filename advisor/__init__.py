"""The sidecar: receives what engines report, keeps the graph, ranks, and publishes advice.
``service`` is its loop, ``planner`` makes its advice, and ``cli`` is the command line.
"""
