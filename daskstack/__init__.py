"""Many image or array files as one array: fast, in bounded memory, never silently wrong.

>>> import daskstack
>>> stack = daskstack.open_stack("frames")
>>> stack.shape
(3, 4, 5)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"
__all__ = ["Output", "Stack", "build", "errors", "open", "open_stack", "store", "verify"]

CLASSES = {"Output": "daskstack.output", "Stack": "daskstack.api.stack"}  # the others are functions of the API

if TYPE_CHECKING:
    from daskstack import errors
    from daskstack.api import build, open, open_stack, store, verify  # noqa: A004
    from daskstack.api.stack import Stack
    from daskstack.output import Output


def __getattr__(name: str) -> Any:
    """Import what is asked for, and no more: ``import daskstack`` alone costs nothing."""
    if name == "errors":
        return importlib.import_module("daskstack.errors")
    if name in __all__:
        return getattr(importlib.import_module(CLASSES.get(name, "daskstack.api")), name)
    raise AttributeError(f"module 'daskstack' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
