"""How the cache hears of a step's logits, whoever drives the model.

A cache is handed to a model and never told which. Until the first output that carries the cache, a
hook on all modules looks for it; from then on a hook on that one model does. Both go with the
cache.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.hooks import RemovableHandle

Heard = Callable[[Any, Tensor], None]


class LogitsWatch:
    """Tells ``heard(cache, logits)`` of every forward pass whose output carries the cache.

    ``heard`` must not hold the cache.
    """

    def __init__(self, cache: Any, heard: Heard) -> None:
        self._cache = weakref.ref(cache)
        self._heard = heard
        self._handle: RemovableHandle = register_module_forward_hook(self._found)
        weakref.finalize(cache, self.stop)

    @property
    def listening(self) -> bool:
        """Whether a hook is there."""
        hooks = self._handle.hooks_dict_ref()
        return hooks is not None and self._handle.id in hooks

    def stop(self) -> None:
        """Take the hook away."""
        self._handle.remove()

    def _found(self, module: torch.nn.Module, given: Any, output: Any) -> None:
        if self._tell(module, given, output):
            self._handle.remove()
            self._handle = module.register_forward_hook(self._tell_hook)

    def _tell_hook(self, module: torch.nn.Module, given: Any, output: Any) -> None:
        self._tell(module, given, output)

    def _tell(self, module: torch.nn.Module, given: Any, output: Any) -> bool:
        """Whether this output has logits and is about our cache."""
        cache, logits = self._cache(), getattr(output, "logits", None)
        if cache is None or logits is None:
            return False
        if getattr(output, "past_key_values", None) is not cache:
            return False
        self._heard(cache, logits)
        return True
