"""The engine's end of the wire, part by part: ``client.py`` puts them together.

``outbox`` holds events until they are sent, ``mailbox`` holds what the sidecar said last, ``link``
is the socket between them and knows whether anybody answers.
"""
