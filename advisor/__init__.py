"""The sidecar: receives what engines do, keeps the graph, ranks, and publishes advice.

``service`` is its loop and ``planner`` its opinion; ``cli`` is the command line that people type.
"""
