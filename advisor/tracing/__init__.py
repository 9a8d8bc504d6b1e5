"""Requests as OpenTelemetry traces, sent where an OTLP endpoint is configured.

The log of requests is the queue: it is bounded, nobody waits for it, and what it forgets before it
was sent is counted.
"""
