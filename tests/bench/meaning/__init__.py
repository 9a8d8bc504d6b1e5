"""``kvgraph bench meaning``: what the graph understands of traffic that nobody annotated.

Chat templates and what models write are made here, after the published formats of model families;
the templates teach, and what is written apart from them is what must be understood.
"""
