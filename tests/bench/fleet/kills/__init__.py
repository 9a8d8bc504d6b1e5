"""``kill -9`` of everything that a fleet consists of, while requests are in flight: real engines,
and Mooncake's store in a network of its own.
"""
