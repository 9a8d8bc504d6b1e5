"""``kvgraph calibrate MODEL``: may this model's keys and values be brought to other positions?

``spliced_model`` computes with spliced keys, ``trials`` measures it beside computing all again,
``verdict`` judges what was measured, and ``calibrate_cli`` keeps the result where engines look.
"""

from .command import app

__all__ = ["app"]
