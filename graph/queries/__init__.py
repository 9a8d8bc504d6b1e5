"""Answers people's questions about the graph, and changes nothing.

``views`` says why a block ranks where it does and what is near it, ``stats`` how much of everything
there is, ``held_chains`` how much of a session's context its engine still has.
"""
