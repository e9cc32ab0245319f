"""A stack as xarray sees it: what :func:`xarray.open_zarr` makes of the group that is built of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from daskstack.extras import needed
from daskstack.stack import FileStack
from daskstack.targets import along_axes

if TYPE_CHECKING:
    import xarray


def as_dataset(stack: FileStack) -> xarray.Dataset:
    """The stack as a lazy Dataset; see :meth:`daskstack.Stack.to_xarray`."""
    module = needed("xarray", "xarray", "to_xarray")
    columns = {name: (stack.axes, np.asarray(values).reshape(stack.grid)) for name, values in stack.columns.items()}
    labels = {name: along_axes(name, v, stack.axes, stack.grid) for name, v in stack.item_labels.items()}
    found: xarray.Dataset = module.Dataset({"data": (stack.dims, stack.array)}, coords={**columns, **labels})
    return found
