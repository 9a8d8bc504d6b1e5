"""``kvgraph bench meaning``, and chats of 15 families of models for it and for tests.

Chat templates and what models write are made here, after the published formats of model families;
the templates teach, and what is written apart from them is what must be understood.
"""
