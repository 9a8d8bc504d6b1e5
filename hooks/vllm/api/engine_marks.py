"""By which marks the answers of an engine end: stated by an operator, or learned."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from ..ends.end_marks import handed_over
from ..settings import reads_ends
from .learned_marks import learn_marks

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)


def engine_marks(config: VllmConfig, chat_template: str | None = None) -> str:
    """The marks as they are handed to the scheduler's process; empty if there are none.

    Never raises: an engine whose template cannot be read has no marks.
    """
    if not reads_ends():
        return ""
    try:
        marks = handed_over({}, os.environ)
        if marks is None or not marks.are_of(str(config.model_config.model)):
            marks = learn_marks(config, chat_template)
    except Exception:
        logger.debug("kvgraph: the chat template could not be tried", exc_info=True)
        return ""
    if marks is None:
        logger.debug("kvgraph: the chat template writes no tool calls")
        return ""
    logger.info("kvgraph: tool calls and ends of turns are read off the ends of answers")
    return marks.text()
