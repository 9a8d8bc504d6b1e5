"""What people see: the HTTP surface, metrics, and the page (``web``, built into ``page``)."""
