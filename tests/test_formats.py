"""Files of other kinds, each written by its own library and read by the function that the README shows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Array, image

import daskstack
from daskstack.errors import BadFilesError

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCK = re.compile(r"^```python\n((?:(?!```).)*)^```", re.MULTILINE | re.DOTALL)
SHOWN = {found[1]: block for block in BLOCK.findall(README) if (found := re.search(r'"data/\*(.+?)"', block))}


def write_npz(path: Path, array: Array) -> None:
    np.savez_compressed(path, frame=array, time=3.5)


def write_hdf5(path: Path, array: Array) -> None:
    import h5py

    with h5py.File(path, "w") as file:  # type: ignore[attr-defined,no-untyped-call]
        file.create_dataset("entry/data", data=array, compression="gzip")


def write_fits(path: Path, array: Array) -> None:
    from astropy.io import fits

    fits.writeto(path, array)  # type: ignore[no-untyped-call]


def write_nifti(path: Path, array: Array) -> None:
    import nibabel

    nibabel.save(nibabel.Nifti1Image(array, np.eye(4)), path)  # type: ignore[no-untyped-call]


def write_dicom(path: Path, array: Array) -> None:
    from pydicom.dataset import Dataset, FileMetaDataset
    from pydicom.uid import ExplicitVRLittleEndian, SecondaryCaptureImageStorage, generate_uid

    data = Dataset()
    data.file_meta = FileMetaDataset()
    data.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    data.SOPClassUID, data.SOPInstanceUID = SecondaryCaptureImageStorage, generate_uid()
    data.set_pixel_data(array, "MONOCHROME2", 16)
    data.save_as(path, enforce_file_format=True)


def write_czi(path: Path, array: Array) -> None:
    from pylibCZIrw import czi

    with czi.create_czi(str(path)) as document:
        document.write(array, plane={"T": 0, "Z": 0, "C": 0})


WRITERS: dict[str, Any] = {
    ".npz": write_npz,
    ".h5": write_hdf5,
    ".fits": write_fits,
    ".nii.gz": write_nifti,
    ".dcm": write_dicom,
    ".czi": write_czi,
}


def test_every_reader_that_the_readme_shows_is_tested() -> None:
    assert SHOWN.keys() == WRITERS.keys()


@pytest.mark.parametrize("suffix", WRITERS)
def test_reader_in_the_readme(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for k in (1, 2, 10):
        WRITERS[suffix](tmp_path / "data" / f"f{k}{suffix}", image(k))
    names: dict[str, Any] = {"daskstack": daskstack}
    exec(SHOWN[suffix], names)
    (out,) = (p for p in tmp_path.glob("*.npy"))
    found = np.load(out)
    assert found.dtype == np.dtype("uint16")
    assert np.array_equal(found.reshape(3, 5, 7), np.stack([image(k) for k in (1, 2, 10)]))
    assert daskstack.verify(out, data=True, progress=False).status == 0
    (reader,) = (f for name, f in names.items() if name.startswith("read_"))
    broken = tmp_path / "data" / f"f2{suffix}"
    broken.write_bytes(broken.read_bytes()[:40])
    with pytest.raises(BadFilesError) as caught:
        daskstack.build(f"data/*{suffix}", "again.npy", reader=reader, progress=False)
    assert [bad.path for bad in caught.value.files] == [str(broken)]
