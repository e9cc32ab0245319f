"""How the code is laid out: layers, public names, what an import costs, errors that can travel."""

from __future__ import annotations

import ast
import inspect
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import daskstack
from daskstack import errors

PACKAGE = Path(daskstack.__file__).parent

# Each row may import from the rows above it, never from its own.
ROWS: list[set[str]] = [
    {"daskstack"},
    {"text", "order"},
    {"errors"},
    {"extras"},
    {"blocks", "files", "pictures"},
    {"ahead"},
    {"discover", "names", "readers", "targets", "display", "jobs"},
    {"reads", "receipts", "sorting"},
    {"tasks"},
    {"stack", "plan", "staging", "progress", "output", "report"},
    {"opening", "checks", "derived", "publication", "xarrays", "hosts", "batch"},
    {"run", "cluster", "verification"},
    {"api"},
    {"demo"},
    {"cli"},
    {"__main__"},
]
HEAVY = {"dask", "distributed", "zarr", "tifffile", "imagecodecs", "tqdm", "matplotlib", "xarray", "dask_jobqueue"}
MAY_IMPORT_DASK = {"jobs", "stack", "derived", "output", "run", "cluster", "api"}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room(path: Path) -> str:
    """The module of the package, or the folder, that a file belongs to."""
    first = path.relative_to(PACKAGE).parts[0]
    return "daskstack" if first == "__init__.py" else first.removesuffix(".py")


def imports(path: Path) -> set[str]:
    """Full names of all modules that a file imports, at its top or inside functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def rooms_imported(path: Path) -> set[str]:
    names = [name.split(".") for name in imports(path)]
    return {parts[1] for parts in names if parts[0] == "daskstack" and len(parts) > 1}


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_module_imports_only_from_rows_above_it(path: Path) -> None:
    own = room(path)
    row = next(k for k, rooms in enumerate(ROWS) if own in rooms)
    if own == "daskstack":  # its names are imported when they are asked for
        return
    above = set().union(*ROWS[:row]) | {own, "__version__"}
    assert rooms_imported(path) <= above


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_only_some_modules_know_dask_and_none_imports_it_at_its_top(path: Path) -> None:
    used = {name.split(".")[0] for name in imports(path)} & HEAVY
    assert "dask" not in used or room(path) in MAY_IMPORT_DASK
    for node in ast.parse(path.read_text()).body:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [str(node.module)]
        assert not {name.split(".")[0] for name in names} & HEAVY


def test_readers_know_nothing_of_each_other_but_for_the_contract() -> None:
    for folder in ("readers", "targets"):
        for path in (PACKAGE / folder).glob("*.py"):
            if path.stem not in ("__init__", "base"):
                inner = {n.split(".")[2] for n in imports(path) if n.startswith(f"daskstack.{folder}.")}
                own = path.stem.partition("_")[0]
                assert {n for n in inner if not n.startswith(f"{own}_")} <= {"base", "layout", "shard"}


def test_public_names() -> None:
    assert daskstack.__all__ == ["Output", "Stack", "build", "errors", "open", "open_stack", "store", "verify"]
    assert all(name in dir(daskstack) and getattr(daskstack, name) is not None for name in daskstack.__all__)
    stems = {path.stem for path in modules()}
    assert not stems & (set(daskstack.__all__) - {"errors"}), "a module would put itself in a function's place"
    with pytest.raises(AttributeError, match="no attribute 'opne_stack'"):
        daskstack.opne_stack  # noqa: B018


def test_public_functions_have_examples_and_types() -> None:
    from daskstack import api

    for value in (
        api.open_stack,
        api.build,
        api.open,
        daskstack.Stack,
        daskstack.Stack.plan,
        daskstack.Stack.to_npy,
        daskstack.Stack.to_zarr,
        daskstack.Stack.preview,
        daskstack.Stack.to_xarray,
        daskstack.Output.preview,
    ):
        assert ">>> " in inspect.getdoc(value)  # type: ignore[operator]
        if not inspect.isclass(value):
            parameters = inspect.signature(value).parameters.values()
            assert all(p.annotation is not inspect.Parameter.empty for p in parameters if p.name != "self")


def every_error() -> list[errors.DaskstackError]:
    bad = errors.BadFileError("a.tif", "uint8", "uint16")
    return [
        errors.DaskstackError("message", "advice"),
        errors.UsageError("message", "advice"),
        errors.SourceError("message", "advice"),
        errors.LabelError("message", "advice"),
        bad,
        errors.BadFilesError("message", "advice", [bad]),
        errors.OutputExistsError("message", "advice"),
        errors.OutputError("message", "advice"),
        errors.NoSpaceError("message", "advice"),
    ]


def test_every_error_is_in_the_tree_and_in_its_docstring() -> None:
    classes = {v for v in vars(errors).values() if inspect.isclass(v) and issubclass(v, errors.DaskstackError)}
    assert classes == {type(e) for e in every_error()}
    for one in classes:
        kinds = [b for b in one.__mro__ if b.__module__ == "builtins" and b not in (Exception, BaseException, object)]
        assert f"{one.__name__} " in f"{errors.__doc__} DaskstackError "
        if one is not errors.DaskstackError:
            assert f"{one.__name__:20}({kinds[0].__name__})" in str(errors.__doc__)


@pytest.mark.parametrize("error", every_error(), ids=lambda e: type(e).__name__)
def test_errors_can_be_pickled(error: errors.DaskstackError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again).keys() == vars(error).keys()


def imported_by(code: str, cwd: Path) -> set[str]:
    script = f"import sys\n{code}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=cwd)
    return set(done.stdout.split())


def test_import_and_help_import_nothing_heavy(tmp_path: Path) -> None:
    assert not imported_by("import daskstack", tmp_path) & {*HEAVY, "numpy", "click"}
    help_text = "from daskstack.cli import main\nmain(['--help'], standalone_mode=False)"
    assert not imported_by(help_text, tmp_path) & {*HEAVY, "numpy"}


def test_the_api_imports_what_every_build_needs_and_no_more(tmp_path: Path) -> None:
    found = imported_by("import daskstack.api", tmp_path)
    rooms = {name.split(".")[1] for name in found if name.startswith("daskstack.")}
    assert {room(path) for path in modules()} - rooms == {
        "__main__", "batch", "cli", "daskstack", "demo", "derived", "display", "output", "verification", "xarrays",
    }  # fmt: skip
    assert not found & {*HEAVY, "email", "html", "importlib.metadata"}


def test_a_build_from_tiff_to_npy_under_threads_imports_neither_dask_array_nor_distributed_nor_zarr(
    frames: Path,
) -> None:
    code = "import daskstack\ndaskstack.build('frames', 'out.npy', progress=False)"
    found = imported_by(code, frames.parent)
    assert "dask" in found
    assert not found & {"distributed", "zarr", "dask.array"}
