"""A user's own function as a reader: anything that turns a path into an array."""

from __future__ import annotations

import functools
import marshal
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from daskstack.errors import BadFileError
from daskstack.readers.base import Array, Contents, Reader, dims

NO_REFERENCES = 2  # version of marshal's format; the bytes of later ones depend on who else holds the constants


@dataclass(frozen=True)
class FunctionReader(Reader):
    """Calls ``function(path)``, once a read, and takes the array that it returns.

    Parameters
    ----------
    join : {"stack", "concat"}
        As for every reader.
    function : callable
        Takes the path (str) and returns a NumPy array of plain values.
    """

    function: Callable[[str], Any] = field(kw_only=True)

    suffixes: ClassVar[tuple[str, ...]] = ()

    def identity(self) -> bytes | None:
        """How the function is pickled (its name, or an object's state), and its code.

        One that cannot be pickled (a lambda) is like no other, not even like itself in another run.
        """
        try:
            state = pickle.dumps(self)
        except Exception:  # noqa: BLE001  # pickle raises many kinds
            return None
        function: Any = self.function
        while isinstance(function, functools.partial):
            function = function.func
        called = function if hasattr(function, "__code__") else type(function).__call__
        code = getattr(called, "__code__", None)  # none where it is written in C
        defaults = repr((getattr(called, "__defaults__", None), getattr(called, "__kwdefaults__", None)))
        return state + (marshal.dumps(code, NO_REFERENCES) if code else b"") + defaults.encode()

    @contextmanager
    def open(self, path: str) -> Iterator[Contents]:
        """Call the function; there is no header to read before."""
        array = self.function(path)
        if not isinstance(array, np.ndarray) or isinstance(array, np.ma.MaskedArray):
            raise BadFileError(path, f"{type(array).__name__} from the reader", "a NumPy array")
        if array.dtype.hasobject:
            raise BadFileError(path, "Python objects from the reader", "plain values")

        def read(out: Array, start: int) -> None:
            pages = array if array.ndim else array[None]
            out[...] = pages[start : start + len(out)]

        yield Contents(array.shape, array.dtype, max(0, array.ndim - 1), read, dims=dims(array.shape))
