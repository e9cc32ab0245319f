"""One contract that every reader passes, and what each format is strict about."""

from __future__ import annotations

import logging
import os
import pickle
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import tifffile
from conftest import DATA, Array, few_descriptors, image, open_below
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from daskstack.errors import BadFileError, UsageError
from daskstack.readers import FunctionReader, Header, NpyReader, Reader, TiffReader, choose


def load(path: str) -> Array:
    """A user's reader; at the top of a module, so that it can travel."""
    with open(path, "rb") as f:
        return np.lib.format.read_array(f)


class ReaderContract:
    """What is due of every reader."""

    suffix: str
    dtype = "uint16"
    shape: tuple[int, ...] = (5, 7)
    dtypes: tuple[str, ...] = ("uint8", "uint16", "int16", "uint32", "int32", "float32", "float64")
    shapes: tuple[tuple[int, ...], ...] = ((1, 7), (7, 5), (1, 35), (5, 7, 1), (1, 5, 7), (10, 7))

    def make(self, join: Literal["stack", "concat"] = "stack") -> Reader:
        raise NotImplementedError

    def write(self, path: Path, array: Array) -> None:
        raise NotImplementedError

    def item(self, k: int) -> Array:
        return image(k, self.shape, self.dtype)

    def room(self, items: int) -> Array:
        return np.zeros((items, *self.shape), self.dtype)

    def files(self, folder: Path, arrays: list[Array]) -> list[str]:
        paths = [folder / f"f{k}{self.suffix}" for k in range(len(arrays))]
        for path, array in zip(paths, arrays, strict=True):
            self.write(path, array)
        return [str(p) for p in paths]

    def refused(self, path: str, due: Header) -> BadFileError:
        """The error of a bad file between two good ones, whose pixels must be there all the same."""
        folder = Path(path).parent
        self.write(folder / f"before{self.suffix}", self.item(1))
        self.write(folder / f"after{self.suffix}", self.item(2))
        out = self.room(3)
        paths = [str(folder / f"before{self.suffix}"), path, str(folder / f"after{self.suffix}")]
        bad = self.make().read_into(paths, out, due)
        assert [b.path for b in bad] == [path]
        assert np.array_equal(out[0], self.item(1))
        assert np.array_equal(out[2], self.item(2))
        return bad[0]

    def due(self) -> Header:
        return Header(1, self.shape, np.dtype(self.dtype), ("y", "x", "s")[: len(self.shape)])

    def test_probe(self, tmp_path: Path) -> None:
        (path,) = self.files(tmp_path, [self.item(3)])
        found = self.make().probe(path)
        assert (found.rows, found.shape, found.dtype) == (1, self.shape, np.dtype(self.dtype))
        assert found.dtype.isnative
        cast = replace(self.make(), dtype="float64").probe(path)
        assert (cast.rows, cast.shape, cast.dtype) == (1, self.shape, np.dtype("float64"))

    def test_exact_values(self, tmp_path: Path) -> None:
        for dtype in self.dtypes:
            arrays = [image(k, self.shape, dtype) for k in range(3)]
            paths = self.files(tmp_path, arrays)
            out = self.room(3).astype(dtype)
            assert self.make().read_into(paths, out, self.make().probe(paths[0])) == []
            assert np.array_equal(out, np.stack(arrays))
            out = self.room(3).astype("float64")
            cast = replace(self.make(), dtype="float64")
            assert cast.read_into(paths, out, cast.probe(paths[0])) == []
            assert np.array_equal(out, np.stack(arrays).astype("float64"))

    def test_one_file(self, tmp_path: Path) -> None:
        (path,) = self.files(tmp_path, [self.item(9)])
        out = self.room(1)
        self.make().read(path, self.due(), out)
        assert np.array_equal(out[0], self.item(9))

    @pytest.mark.parametrize("cast", [None, "float32"])
    def test_strided_out(self, tmp_path: Path, cast: str | None) -> None:
        due = [self.item(k) for k in range(3)]
        paths = self.files(tmp_path, due)
        whole = np.zeros((6, *self.shape[:-1], 2 * self.shape[-1]), cast or self.dtype)
        reader = replace(self.make(), dtype=cast)
        assert reader.read_into(paths, whole[::2, ..., ::2], reader.probe(paths[0])) == []
        assert np.array_equal(whole[::2, ..., ::2], np.stack(due))
        assert not whole[1::2].any()
        assert not whole[..., 1::2].any()

    def test_another_shape(self, tmp_path: Path) -> None:
        for shape in self.shapes:
            (path,) = self.files(tmp_path, [image(0, shape, self.dtype)])
            assert f"due {self.shape} {self.dtype}" in self.refused(path, self.due()).message

    def test_another_dtype(self, tmp_path: Path) -> None:
        for dtype in {*self.dtypes} - {self.dtype}:
            (path,) = self.files(tmp_path, [image(0, self.shape, dtype)])
            due = f"{self.dtype}; or cast all files by dtype="
            assert self.refused(path, self.due()).problem == f"found {dtype}, due {due}"

    def test_empty_file(self, tmp_path: Path) -> None:
        path = tmp_path / f"empty{self.suffix}"
        path.touch()
        assert "0 bytes" in self.refused(str(path), self.due()).message

    def test_every_truncation(self, tmp_path: Path) -> None:
        (path,) = self.files(tmp_path, [self.item(3)])
        data = Path(path).read_bytes()
        for size in [*range(0, len(data), 1 + len(data) // 400), len(data) - 1]:
            Path(path).write_bytes(data[:size])
            out = self.room(1)
            bad = self.make().read_into([path], out, self.due())
            # Metadata behind the pixels may be cut without harm; then the pixels are all there.
            assert [b.path for b in bad] == [path] or np.array_equal(out[0], self.item(3))

    @pytest.mark.parametrize(
        "head", [b"", b"\0" * 20, b"<!DOCTYPE html><html>", b"version https://git-lfs.github.com/spec/v1\n"]
    )
    def test_wrong_content_under_the_suffix(self, tmp_path: Path, head: bytes) -> None:
        path = tmp_path / f"wrong{self.suffix}"
        path.write_bytes(head + b"something else altogether")
        self.refused(str(path), self.due())

    def test_vanished_and_unreadable(self, tmp_path: Path) -> None:
        assert "no such file" in self.refused(str(tmp_path / f"gone{self.suffix}"), self.due()).message.lower()
        folder = tmp_path / f"folder{self.suffix}"
        folder.mkdir()
        self.refused(str(folder), self.due())
        (path,) = self.files(tmp_path, [self.item(4)])
        os.chmod(path, 0)
        root = os.geteuid() == 0  # who may read everything, and so becomes nobody
        if root:
            os.seteuid(65534)
        try:
            bad = self.make().read_into([path], self.room(1), self.due())
        finally:
            if root:
                os.seteuid(0)
        assert [b.problem for b in bad] == ["permission denied"]

    def test_pickled_and_equal(self, tmp_path: Path) -> None:
        (path,) = self.files(tmp_path, [self.item(4)])
        again: Reader = pickle.loads(pickle.dumps(self.make()))
        assert again == self.make()
        assert again.identity() == self.make().identity() != replace(again, dtype="float64").identity()
        assert again.probe(path) == self.make().probe(path)

    def test_many_threads_no_descriptor_left_open(self, tmp_path: Path) -> None:
        arrays = [self.item(k) for k in range(300)]
        paths = self.files(tmp_path, arrays)
        (tmp_path / f"empty{self.suffix}").touch()
        reader, due = self.make(), self.due()

        def one(k: int) -> bool:
            out = self.room(1)
            return reader.read_into([paths[k]], out, due) == [] and np.array_equal(out[0], arrays[k])

        with few_descriptors():
            with ThreadPoolExecutor(8) as pool:
                assert all(pool.map(one, range(300)))
            for _ in range(100):
                assert reader.read_into([str(tmp_path / f"empty{self.suffix}")], self.room(1), due)
        assert open_below(tmp_path) == []


class PagesContract(ReaderContract):
    """What is due of the readers of formats whose files hold many items."""

    def test_probe_of_pages(self, tmp_path: Path) -> None:
        (path,) = self.files(tmp_path, [image(3, (4, 5, 6))])
        assert self.make().probe(path).rows == 1
        assert self.make().probe(path).shape == (4, 5, 6)
        joined = self.make("concat").probe(path)
        assert (joined.rows, joined.shape) == (4, (5, 6))

    @pytest.mark.parametrize(("start", "stop"), [(0, 6), (0, 2), (2, 5), (5, 6)])
    @pytest.mark.parametrize("cast", [None, "float32"])
    def test_some_items_of_a_file(self, tmp_path: Path, start: int, stop: int, cast: str | None) -> None:
        stack = image(1, (6, 5, 7))
        (path,) = self.files(tmp_path, [stack])
        out = np.zeros((stop - start, 5, 7), cast or "uint16")
        reader = replace(self.make("concat"), dtype=cast)
        assert reader.read_into([path], out, reader.probe(path), [(6, start, stop)]) == []
        assert np.array_equal(out, stack[start:stop])

    def test_files_of_unequal_length_joined(self, tmp_path: Path) -> None:
        arrays = [image(k, (n, 5, 7)) for k, n in enumerate((3, 2, 4))]
        paths = self.files(tmp_path, arrays)
        out = np.zeros((9, 5, 7), "uint16")
        pieces = [(n, 0, n) for n in (3, 2, 4)]
        assert self.make("concat").read_into(paths, out, self.make("concat").probe(paths[0]), pieces) == []
        assert np.array_equal(out, np.concatenate(arrays))

    def test_another_number_of_items_than_when_it_was_listed(self, tmp_path: Path) -> None:
        (path,) = self.files(tmp_path, [image(0, (3, 5, 7))])
        reader = self.make("concat")
        bad = reader.read_into([path], np.zeros((4, 5, 7), "uint16"), reader.probe(path), [(4, 0, 4)])
        assert [b.problem for b in bad] == ["found 3 items, due 4, as when the files were listed"]


class TestNpy(PagesContract):
    suffix = ".npy"

    def make(self, join: Literal["stack", "concat"] = "stack") -> Reader:
        return NpyReader(join)

    def write(self, path: Path, array: Array) -> None:
        np.save(path, array)

    @settings(max_examples=150, deadline=None)
    @given(
        array=hnp.arrays(
            dtype=st.one_of(
                hnp.boolean_dtypes(),
                hnp.integer_dtypes(endianness="?"),
                hnp.floating_dtypes(endianness="?", sizes=(16, 32, 64)),
                hnp.complex_number_dtypes(endianness="?", sizes=(64, 128)),
                hnp.datetime64_dtypes(endianness="?"),
                hnp.unicode_string_dtypes(endianness="?", max_len=5),
                st.just(np.dtype([("x", ">f4"), ("flag", "?"), ("id", "<i8", (2,))])),
            ),
            shape=hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4),
        ),
        fortran=st.booleans(),
        version=st.sampled_from([(1, 0), (2, 0), (3, 0)]),
    )
    def test_whatever_numpy_writes_is_read_equal(
        self, tmp_path_factory: pytest.TempPathFactory, array: Array, fortran: bool, version: tuple[int, int]
    ) -> None:
        path = str(tmp_path_factory.mktemp("npy") / "a.npy")
        with open(path, "wb") as f:
            np.lib.format.write_array(f, np.asfortranarray(array) if fortran else array, version=version)
        due = NpyReader().probe(path)
        assert due.dtype == array.dtype.newbyteorder("=")
        out = np.empty((1, *due.shape), due.dtype)
        NpyReader().read(path, due, out)
        assert out.tobytes() == np.ascontiguousarray(array.astype(due.dtype)).tobytes()
        if array.ndim:
            joined = NpyReader("concat").probe(path)
            half = len(array) // 2
            part = np.empty((len(array) - half, *joined.shape), joined.dtype)
            assert NpyReader("concat").read_into([path], part, joined, [(joined.rows, half, joined.rows)]) == []
            assert part.tobytes() == np.ascontiguousarray(array[half:].astype(due.dtype)).tobytes()

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"version https://git-lfs.github.com/spec/v1\noid", "a Git LFS pointer"),
            (b"PK\x03\x04 an archive", "a ZIP archive"),
            (b"II*\0 an image", "a TIFF file under another suffix"),
            (b"\x93NUMPY\x04\x00\x10\x00", "a .npy header of version 4.0, due 1.0, 2.0 or 3.0"),
            (b"\x93NUMPY\xff\xff", "a .npy header of version none.255, due 1.0, 2.0 or 3.0"),
            (b"\x93NUMPY\x02\x00\xff\xff\xff\x7f", "a .npy header of 2147483647 bytes, due at most 1048576"),
            (b"\x93NUMPY\x01\x00\x20\x00{'descr'", "found 18 bytes, due a header of 42"),
        ],
    )
    def test_what_is_no_npy_is_said(self, tmp_path: Path, content: bytes, message: str) -> None:
        (tmp_path / "x.npy").write_bytes(content)
        text = self.refused(str(tmp_path / "x.npy"), self.due()).message
        assert message in text.replace("version 255", "version none")
        assert "allow_pickle" not in text

    @pytest.mark.parametrize(
        "header",
        [
            "{'descr': '<u2', 'fortran_order': False, 'shape': (5, 7), 'more': 1}",
            "{'descr': '<u2', 'fortran_order': False}",
            "{'descr': '<u2', 'fortran_order': 'yes', 'shape': (5, 7)}",
            "{'descr': '<u2', 'fortran_order': False, 'shape': (5, -7)}",
            "{'descr': '<u2', 'fortran_order': False, 'shape': (5, True)}",
            "{'descr': '<u2', 'fortran_order': False, 'shape': (np.int64(5), 7)}",
            "{'descr': '<u2', 'fortran_order': False, 'shape': [5, 7]}",
            "{'descr': 'nonsense', 'fortran_order': False, 'shape': (5, 7)}",
            "{'descr': '|O', 'fortran_order': False, 'shape': (5, 7)}",
            "{'descr': [('a', '|O')], 'fortran_order': False, 'shape': (5, 7)}",
            "__import__('os').system('touch executed')",
            "[" * 5000,
            "(5, 7)",
        ],
    )
    def test_headers_that_cannot_be_meant(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, header: str) -> None:
        monkeypatch.chdir(tmp_path)
        text = header.encode()
        (tmp_path / "x.npy").write_bytes(
            b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + image(0).tobytes()
        )
        assert "a .npy header that cannot be read" in self.refused(str(tmp_path / "x.npy"), self.due()).message
        assert not (tmp_path / "executed").exists()

    def test_a_shape_larger_than_memory_is_refused_before_it_is_taken(self, tmp_path: Path) -> None:
        text = b"{'descr': '<u2', 'fortran_order': True, 'shape': (1000000000, 1000000000, 1000000000)}"
        (tmp_path / "x.npy").write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text)
        with pytest.raises(BadFileError, match=r"its shape is \(1000000000, 1000000000, 1000000000\)"):
            NpyReader().probe(str(tmp_path / "x.npy"))

    def test_python_2_wrote_long_integers(self, tmp_path: Path) -> None:
        text = b"{'descr': '<u2', 'fortran_order': False, 'shape': (5L, 7L), }"
        (tmp_path / "x.npy").write_bytes(
            b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + image(3).tobytes()
        )
        out = np.zeros((1, 5, 7), "uint16")
        NpyReader().read(str(tmp_path / "x.npy"), self.due(), out)
        assert np.array_equal(out[0], image(3))

    def test_a_record_with_many_fields(self, tmp_path: Path) -> None:
        dtype = np.dtype([(f"field_{k:04d}", "<f4") for k in range(3000)])
        array = np.zeros(2, dtype)
        array["field_2999"] = 5
        with pytest.warns(UserWarning, match="Stored array in format 2.0"):
            np.save(tmp_path / "x.npy", array)
        due = NpyReader().probe(str(tmp_path / "x.npy"))
        out = np.empty((1, 2), due.dtype)
        NpyReader().read(str(tmp_path / "x.npy"), due, out)
        assert np.array_equal(out[0], array)

    @pytest.mark.parametrize(
        ("change", "more"),
        [
            (lambda b: b[:-1], ""),
            (lambda b: b + b"\0", ""),
            (lambda b: b + b, ", several arrays one after another"),
        ],
    )
    def test_length_must_be_what_the_header_says(
        self, tmp_path: Path, change: Callable[[bytes], bytes], more: str
    ) -> None:
        np.save(tmp_path / "x.npy", image(0))
        data = (tmp_path / "x.npy").read_bytes()
        (tmp_path / "x.npy").write_bytes(change(data))
        problem = self.refused(str(tmp_path / "x.npy"), self.due()).problem
        assert problem == f"found {len(change(data))} bytes{more}, due 198 for (5, 7) uint16 as its header says"


class TestTiff(PagesContract):
    suffix = ".tif"

    def make(self, join: Literal["stack", "concat"] = "stack") -> Reader:
        return TiffReader(join)

    def write(self, path: Path, array: Array) -> None:
        tifffile.imwrite(path, array, photometric="minisblack")

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"byteorder": ">"},
            {"bigtiff": True},
            {"imagej": True, "metadata": {"Info": "x" * 100}},
            {"rowsperstrip": 2},
            {"tile": (16, 16)},
            {"compression": "zlib"},
            {"compression": "zlib", "predictor": True, "byteorder": ">"},
            {"compression": "lzw", "tile": (16, 16)},
            {"compression": "packbits", "rowsperstrip": 3},
            {"compression": "zstd"},
            {"metadata": None},
            {"description": "found on a beach"},
        ],
    )
    @pytest.mark.parametrize("shape", [(21, 37), (3, 21, 37)])
    def test_kinds_are_read_as_tifffile_reads_them(
        self, tmp_path: Path, options: dict[str, Any], shape: tuple[int, ...]
    ) -> None:
        path = str(tmp_path / "x.tif")
        tifffile.imwrite(path, image(2, shape), photometric="minisblack", **options)
        due = TiffReader().probe(path)
        assert due.shape == shape
        out = np.zeros((1, *due.shape), due.dtype)
        TiffReader().read(path, due, out)
        assert np.array_equal(out[0], tifffile.imread(path))
        pages = TiffReader("concat").probe(path)
        assert (pages.rows, pages.shape) == (int(np.prod(shape[:-2])), shape[-2:])
        last = np.zeros((1, *pages.shape), pages.dtype)
        assert TiffReader("concat").read_into([path], last, pages, [(pages.rows, pages.rows - 1, pages.rows)]) == []
        assert np.array_equal(last[0], image(2, shape).reshape(-1, *shape[-2:])[-1])

    def test_real_files(self) -> None:
        for name in (
            "banana0002.tif",
            "banana0003.tif",
            "banana0010.tif",
            "V1.75f3.1250001.tif",
            "membrane_2d_timelapse.tif",
        ):
            due = TiffReader().probe(str(DATA / name))
            out = np.zeros((1, *due.shape), due.dtype)
            TiffReader().read(str(DATA / name), due, out)
            assert np.array_equal(out[0], tifffile.imread(DATA / name))
            assert out.dtype.isnative

    def test_axes_have_the_names_that_the_file_gives(self, tmp_path: Path) -> None:
        tifffile.imwrite(tmp_path / "x.tif", image(0, (2, 3, 5, 7)), imagej=True, metadata={"axes": "TZYX"})
        assert TiffReader().probe(str(tmp_path / "x.tif")).dims == ("t", "z", "y", "x")
        assert TiffReader("concat").probe(str(tmp_path / "x.tif")).dims == ("y", "x")
        tifffile.imwrite(tmp_path / "c.tif", image(0, (5, 7, 3), "uint8"), photometric="rgb")
        assert TiffReader().probe(str(tmp_path / "c.tif")).dims == ("y", "x", "s")
        tifffile.imwrite(tmp_path / "p.tif", image(0, (4, 5, 7)), photometric="minisblack", metadata=None)
        assert TiffReader().probe(str(tmp_path / "p.tif")).dims == ("dim_1", "y", "x")

    def pages(self, path: Path, arrays: list[Array], **options: Any) -> None:
        with tifffile.TiffWriter(path) as tif:
            for array in arrays:
                tif.write(array, photometric="minisblack", metadata=None, contiguous=False, **options)

    def test_a_page_of_another_size_is_no_small_matter(self, tmp_path: Path) -> None:
        self.pages(tmp_path / "x.tif", [image(0), image(1, (6, 7)), image(2)])
        message = self.refused(str(tmp_path / "x.tif"), self.due()).problem
        choice = "or choose one by series=: 0 (2, 5, 7) uint16, 1 (6, 7) uint16"
        assert message == f"found page 1 (6, 7) uint16, due (5, 7) uint16, as page 0; {choice}"

    def test_a_chain_of_pages_that_breaks_off(self, tmp_path: Path) -> None:
        self.pages(tmp_path / "x.tif", [image(0), image(1), image(2)])
        with tifffile.TiffFile(tmp_path / "x.tif") as tif:
            page = tif.pages[1]
            at = page.offset + 2 + 12 * len(page.tags)  # type: ignore[union-attr]
        data = bytearray((tmp_path / "x.tif").read_bytes())
        struct.pack_into("<I", data, at, len(data) + 100)
        (tmp_path / "x.tif").write_bytes(data)
        assert "tifffile says: " in self.refused(str(tmp_path / "x.tif"), self.due()).message

    def test_a_description_that_promises_more_than_there_is(self, tmp_path: Path) -> None:
        tifffile.imwrite(tmp_path / "x.tif", image(0), metadata=None, description='{"shape": [3, 5, 7]}')
        self.refused(str(tmp_path / "x.tif"), self.due())
        tifffile.imwrite(tmp_path / "y.tif", image(0), metadata=None, description="ImageJ=1.11a\nimages=9\nslices=9\n")
        self.refused(str(tmp_path / "y.tif"), self.due())

    def test_a_strip_that_is_not_stored_is_no_zeros(self, tmp_path: Path) -> None:
        tifffile.imwrite(tmp_path / "x.tif", image(1), photometric="minisblack", metadata=None, rowsperstrip=2)
        data = bytearray((tmp_path / "x.tif").read_bytes())
        with tifffile.TiffFile(tmp_path / "x.tif") as tif:
            offsets, counts = (tif.pages.first.tags[code] for code in (273, 279))
        size = {3: 2, 4: 4}
        for tags in ((offsets, counts), (offsets,), (counts,)):
            broken = data.copy()
            for tag in tags:
                start = tag.valueoffset + size[int(tag.dtype)]
                broken[start : start + size[int(tag.dtype)]] = bytes(size[int(tag.dtype)])
            (tmp_path / "x.tif").write_bytes(broken)
            assert "page 0 has" in self.refused(str(tmp_path / "x.tif"), self.due()).message

    @pytest.mark.parametrize("big", [False, True])
    @pytest.mark.parametrize("pages", [1, 2, 150])
    def test_a_chain_of_pages_that_comes_back_is_no_endless_one(self, tmp_path: Path, pages: int, *, big: bool) -> None:
        path = tmp_path / "x.tif"
        with tifffile.TiffWriter(path, bigtiff=big) as tif:
            for k in range(pages):
                tif.write(image(k), photometric="minisblack", metadata=None, contiguous=False)
        with tifffile.TiffFile(path) as tif:
            last: Any = tif.pages[-1]
            number, entry, offset = (8, 20, "<Q") if big else (2, 12, "<I")
            at = last.offset + number + entry * len(last.tags)
            back = tif.pages[pages // 2].offset
        data = bytearray(path.read_bytes())
        struct.pack_into(offset, data, at, back)
        path.write_bytes(data)
        assert self.refused(str(path), self.due()).problem == f"a chain of pages that comes back to page {pages // 2}"

    @pytest.mark.parametrize("how", ["level", "disabled", "disable"])
    def test_what_tifffile_logs_is_an_error_whatever_became_of_its_logger(self, tmp_path: Path, how: str) -> None:
        logger = tifffile.logger()
        before = logger.level, logger.disabled, logging.root.manager.disable
        try:
            if how == "level":
                logger.setLevel(logging.CRITICAL + 1)
            elif how == "disabled":
                logger.disabled = True
            else:
                logging.disable(logging.CRITICAL)
            self.test_a_chain_of_pages_that_breaks_off(tmp_path)
        finally:
            logger.level, logger.disabled, logging.root.manager.disable = before
            logging.disable(before[2])

    def test_names_in_a_file_are_not_followed(self, tmp_path: Path) -> None:
        names = ["s_0.ome.tif", "s_1.ome.tif"]
        data = "".join(
            f'<TiffData FirstT="{t}" IFD="0" PlaneCount="1"><UUID FileName="{n}">urn:uuid:{t}</UUID></TiffData>'
            for t, n in enumerate(names)
        )
        for k, name in enumerate(names):
            xml = (
                '<?xml version="1.0"?><OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06" '
                f'UUID="urn:uuid:{k}"><Image ID="Image:0"><Pixels ID="Pixels:0" DimensionOrder="XYZCT" Type="uint16" '
                f'SizeX="7" SizeY="5" SizeZ="1" SizeC="1" SizeT="2">{data}</Pixels></Image></OME>'
            )
            tifffile.imwrite(tmp_path / name, image(k), metadata=None, description=xml, photometric="minisblack")
        assert TiffReader().probe(str(tmp_path / names[0])).shape == (5, 7)

    def test_every_flipped_byte_is_an_error_or_what_tifffile_decodes(self, tmp_path: Path) -> None:
        path = tmp_path / "x.tif"
        tifffile.imwrite(path, image(3), photometric="minisblack", metadata=None)
        data = path.read_bytes()
        differ = 0
        for at in range(len(data)):
            for flip in (0x01, 0x80, 0xFF):
                broken = bytearray(data)
                broken[at] ^= flip
                path.write_bytes(broken)
                out = np.zeros((1, 5, 7), "uint16")
                if not TiffReader().read_into([str(path)], out, self.due()):
                    found = tifffile.imread(path)
                    assert np.array_equal(out[0], found)
                    differ += not np.array_equal(found, image(3))
        assert differ >= image(3).nbytes  # flipped pixels pass: nothing in a TIFF tells them

    def test_other_records_of_tifffile_are_left_alone(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        self.test_a_description_that_promises_more_than_there_is(tmp_path)
        assert caplog.records == []
        tifffile.logger().warning("somebody else's")
        assert [r.getMessage() for r in caplog.records] == ["somebody else's"]


class TestFunction(PagesContract):
    suffix = ".dat"

    def make(self, join: Literal["stack", "concat"] = "stack") -> Reader:
        return FunctionReader(join, function=load)

    def write(self, path: Path, array: Array) -> None:
        with path.open("wb") as f:
            np.lib.format.write_array(f, array)

    def test_empty_file(self, tmp_path: Path) -> None:
        path = tmp_path / "empty.dat"
        path.touch()
        assert "cannot be read: ValueError" in self.refused(str(path), self.due()).message

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            ([[1, 2]], "list from the reader, due a NumPy array"),
            (np.ma.masked_array([1], [True]), "MaskedArray from the reader, due a NumPy array"),
            (np.array([{}]), "Python objects from the reader, due plain values"),
        ],
    )
    def test_what_a_function_may_not_return(self, value: object, message: str) -> None:
        with pytest.raises(BadFileError, match=message):
            FunctionReader(function=lambda path: value).probe("x.dat")

    def test_its_own_error_has_the_name_of_the_file(self) -> None:
        def fail(path: str) -> Array:
            raise KeyError("no such dataset")

        with pytest.raises(BadFileError, match=r"x\.dat  cannot be read: KeyError: 'no such dataset'") as caught:
            FunctionReader(function=fail).probe("x.dat")
        assert isinstance(caught.value.__cause__, KeyError)


def test_readers_are_chosen_by_suffix_in_any_case() -> None:
    assert choose("A.NPY", "stack") == NpyReader()
    assert choose("a.TiFf", "concat") == TiffReader("concat")
    assert choose("a.h5", "stack", load) == FunctionReader(function=load)
    with pytest.raises(UsageError, match=r"no reader for \.h5: a\.h5\nnext  daskstack reads \.npy, \.tif, .*\.bmp;"):
        choose("a.h5", "stack")
    with pytest.raises(UsageError, match="no reader for a file without a suffix"):
        choose("a", "stack")
    with pytest.raises(UsageError, match="join='cat'"):
        choose("a.npy", "cat")  # type: ignore[arg-type]


def test_a_pipe_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.tif")
    with pytest.raises(BadFileError, match="not a regular file"):
        TiffReader().probe(str(tmp_path / "x.tif"))
