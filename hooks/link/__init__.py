"""The engine's end of the wire: ``client`` joins ``outbox`` (queued events), ``mailbox`` (the
latest advice) and ``late`` (events made on the sending thread).
"""
