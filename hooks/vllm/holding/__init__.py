"""Holds new sessions back while live sessions leave no room for them: ``holding`` applies
``graph.admission``'s rule, ``arrivals`` recognises live sessions, and ``queue`` keeps held requests
beside vLLM's waiting queue.
"""
