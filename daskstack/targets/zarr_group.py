"""The small files of a Zarr group, version 2 or 3: metadata, coordinates, attributes; and a group read back.

zarr-python makes all of them in memory; the data's own files are :mod:`daskstack.targets.zarr`'s business.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskstack import files
from daskstack.targets.base import Index, file_entry, record_checksum
from daskstack.targets.shard import Compression

DATA = "data"
ROOTS = {2: ".zattrs", 3: "zarr.json"}  # the file of a group that holds its attributes, and so the record
LAST = (".zgroup", "zarr.json")  # what makes a folder a group
MOST_RECORD_BYTES = 64 << 20


def group_files(data: Mapping[str, Any], compression: Compression, index: Index) -> dict[str, bytes]:
    """Every file of a group but for those that hold the data; what makes the folder a group comes last.

    Parameters
    ----------
    data : mapping
        ``zarr_format``, ``shape``, ``dtype``, ``chunks``, ``shards`` and ``dims`` of the array.
    compression : Compression
        Of its chunks.
    index : Index
        Of its items.
    """
    import zarr
    from zarr.storage import MemoryStore

    store = MemoryStore()
    with warnings.catch_warnings():
        # Of texts and times in Zarr 3, and of consolidated metadata: that the specification is young.
        warnings.simplefilter("ignore")
        group = zarr.create_group(store=store, zarr_format=data["zarr_format"])
        axes, grid = index.axes, index.grid
        columns = {name: (axes, np.asarray(values).reshape(grid)) for name, values in index.columns.items()}
        columns |= {name: index.label(name) for name in index.labels}
        for name, (dims, values) in columns.items():
            _create_column(group, name, dims, values)
        _create_data(group, data, compression, [name for name in columns if name not in axes])
        record = {**index.record, "files": _entries(_contents(store, data["zarr_format"]))}
        group.attrs.update({"daskstack": record, "crc32c": record_checksum(record)})
        zarr.consolidate_metadata(store)
    contents = _contents(store, data["zarr_format"])
    return {key: contents[key] for key in sorted(contents, key=lambda key: key in LAST)}


def check_array(data: Mapping[str, Any], compression: Compression) -> None:
    """Raise, whatever zarr-python raises, where it has no metadata for such an array, or reads it as another."""
    import zarr
    from zarr.storage import MemoryStore

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        group: Any = zarr.create_group(store=MemoryStore(), zarr_format=data["zarr_format"])
        _create_data(group, data, compression, [])
        array = group[DATA]
        if array.dtype != data["dtype"]:
            raise TypeError(f"it would become {array.dtype}")
        array[tuple(slice(0, 1) for _ in data["shape"])]  # some it writes, but does not read


def _create_column(group: Any, name: str, dims: tuple[str, ...], values: NDArray[Any]) -> None:
    column = values.astype(np.dtypes.StringDType()) if values.dtype.kind == "U" else values
    chunks = tuple(max(1, n) for n in column.shape)
    if group.metadata.zarr_format == 2:
        attributes = {"_ARRAY_DIMENSIONS": list(dims)}
        array = group.create_array(
            name, shape=column.shape, dtype=column.dtype, chunks=chunks, fill_value=None, attributes=attributes
        )
        array[...] = column
    else:
        group.create_array(name, data=column, dimension_names=dims, chunks=chunks)


def _create_data(group: Any, data: Mapping[str, Any], compression: Compression, coordinates: list[str]) -> None:
    dtype = data["dtype"]
    attributes: dict[str, Any] = {"coordinates": " ".join(coordinates)} if coordinates else {}
    options: dict[str, Any] = {
        "shape": data["shape"],
        "dtype": dtype.newbyteorder("<") if dtype.itemsize > 1 else dtype,
        "chunks": data["chunks"],
    }
    if data["zarr_format"] == 2:
        attributes["_ARRAY_DIMENSIONS"] = list(data["dims"])
        options |= {"fill_value": None, **compression.version_2()}
    else:
        options |= {
            "shards": data["shards"],
            "compressors": compression.version_3(dtype.itemsize),
            "chunk_key_encoding": {"name": "default", "separator": "."},
            "dimension_names": data["dims"],
        }
    group.create_array(DATA, attributes=attributes, **options)


def _contents(store: Any, zarr_format: int) -> dict[str, bytes]:
    contents = {key: value.to_bytes() for key, value in store._store_dict.items()}  # noqa: SLF001
    if zarr_format == 2:
        return {key: _without_checksum_flag(key, value) for key, value in contents.items()}
    return contents


def _without_checksum_flag(key: str, value: bytes) -> bytes:
    """Metadata without the flag that tells numcodecs to write a checksum: each zstd frame says so itself, and
    readers other than zarr-python refuse a flag that they do not know.
    """
    if not key.endswith((".zarray", ".zmetadata")):
        return value

    def mended(entry: dict[str, Any]) -> dict[str, Any]:
        if entry.get("id") == "zstd":
            entry.pop("checksum", None)
        return entry

    return json.dumps(json.loads(value, object_hook=mended), indent=2).encode()


def _entries(contents: Mapping[str, bytes]) -> dict[str, dict[str, int]]:
    """What the record says of the group's other files."""
    changing = (*ROOTS.values(), ".zmetadata")  # they hold the record, or a copy of it
    return {key: file_entry(value) for key, value in contents.items() if key not in changing}


def record_path(out: str) -> str:
    """The file that holds the record of a group: of version 2 where there is none of version 3."""
    found = (os.path.join(out, name) for name in (ROOTS[3], ROOTS[2]))
    return next((path for path in found if os.path.lexists(path)), os.path.join(out, ROOTS[3]))


def read_record(out: str) -> dict[str, Any] | None:
    """How a group was made; None where daskstack did not make it."""
    try:
        attributes = _attributes(out)
        record: dict[str, Any] = attributes["daskstack"]
        return record if attributes["crc32c"] == record_checksum(record) else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def has_other_attributes(out: str) -> bool:
    """Whether somebody gave a group attributes of their own."""
    return _attributes(out).keys() != {"daskstack", "crc32c"}


def _attributes(out: str) -> dict[str, Any]:
    text = json.loads(files.read_regular(record_path(out), MOST_RECORD_BYTES))
    attributes: dict[str, Any] = text["attributes"] if "zarr_format" in text else text
    return attributes


def group_names(record: Mapping[str, Any]) -> set[str]:
    """The small files that a group has according to its record."""
    return {ROOTS[record["zarr_format"]], *record["files"], *([".zmetadata"] if record["zarr_format"] == 2 else [])}


def read_array(out: str, name: str, region: tuple[slice, ...] = ()) -> NDArray[Any]:
    """A part of an array of the group; an array is opened by itself, without what zarr warns of groups."""
    import zarr

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that dates and texts are new to the specification
        array: Any = zarr.open_array(os.path.join(out, name), mode="r")
        return np.asarray(array[region or ...])


def read_files(
    data: Mapping[str, Any], compression: Compression, found: Mapping[str, bytes], region: tuple[slice, ...]
) -> NDArray[Any]:
    """A part of the data as zarr-python decodes it, of the files that hold it, by their names."""
    import zarr
    from zarr.core.buffer import cpu
    from zarr.storage import MemoryStore

    contents: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        group: Any = zarr.create_group(store=MemoryStore(contents), zarr_format=data["zarr_format"])
        _create_data(group, data, compression, [])
        contents |= {f"{DATA}/{name}": cpu.Buffer.from_bytes(text) for name, text in found.items()}
        return np.asarray(group[DATA][region])
