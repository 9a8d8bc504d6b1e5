"""The HTTP API of the page: versioned, typed, and all that the page knows.

Every path is below ``/v1`` and answers ``GET`` with JSON of the model that ``routes`` names (the
schema is served at ``/v1/openapi.json``). What holds for all of them:

* A block is its key as ``0x`` and 16 hexadecimal digits, since JavaScript cannot hold 64 bits; a
  session, tenant, request or engine is its name, as text that anybody may have chosen: show it as
  text and never as HTML. No prompt text and no token id is known here.
* Times named ``at`` and lists named ``starts`` are Unix seconds; what ends in ``_s`` is a duration
  in seconds. ``at`` of an answer says when it was true.
* ``None`` (null) means that nobody knows, which is not zero.
* Records of the logs have an ``id`` that rises by one; ``before`` pages backwards and ``next`` is
  what to ask for then. The logs are rings: what is older than they reach is gone.
* Without the token 401; unknown things 404; wrong input 400 or 422; what cannot be answered just
  now 503 with ``Retry-After``. Each has a ``detail`` in words. See ``dashboards.page_access`` for
  the token and its cookie.
"""
