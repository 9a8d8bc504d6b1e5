"""With which borders an engine's messages begin, learned at its start."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from ..layers.border_table import stated_sections
from ..settings import reads_layers
from .learned_borders import learn_borders

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)


def engine_borders(config: VllmConfig, chat_template: str | None = None) -> str:
    """The table as it is handed to the scheduler's process; empty if there is none.

    Never raises: of an engine whose template cannot be read, no layers are.
    """
    if not reads_layers():
        return ""
    try:
        table = learn_borders(config, stated_sections(os.environ), chat_template)
    except Exception:
        logger.debug("kvgraph: the chat template could not be tried", exc_info=True)
        return ""
    if table is None:
        logger.debug("kvgraph: the chat template shows no borders of messages")
        return ""
    logger.info("kvgraph: which layers prompts have is read off the borders of their messages")
    return table.text()
