"""Holds new sessions back while the live ones leave no room: ``holding`` applies
``graph.admission``'s rule, ``arrivals`` recognises live sessions, ``queue`` keeps held requests
beside vLLM's waiting queue.
"""
