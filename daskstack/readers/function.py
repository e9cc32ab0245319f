"""A user's own function as a reader: anything that turns a path into an array."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from daskstack.errors import BadFileError
from daskstack.readers.base import Array, Contents, Reader, dims


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
