"""The engine's end of the wire. ``client`` puts the parts together.

``outbox`` queues events until they are sent, ``mailbox`` holds the sidecar's latest advice, and
``late`` makes events on the sending thread.
"""
