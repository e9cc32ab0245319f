"""Packages that only some people need: imported when they are used, with one clear error where they are missing."""

from __future__ import annotations

import importlib
from typing import Any

from daskstack.errors import UsageError


def needed(module: str, extra: str, what: str) -> Any:
    """Import a module that one of daskstack's extras brings.

    Raises
    ------
    UsageError
        It is not installed; the error says how it is.

    Examples
    --------
    >>> needed("nowhere", "notebook", "preview")
    Traceback (most recent call last):
    daskstack.errors.UsageError: preview needs nowhere, which is not installed
    next  pip install 'daskstack[notebook]'
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as exc:
        if exc.name is None or exc.name.partition(".")[0] != package:
            raise
        raise UsageError(
            f"{what} needs {package}, which is not installed", f"pip install 'daskstack[{extra}]'"
        ) from exc
