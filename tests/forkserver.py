"""Python in a process of its own, in milliseconds: forked from one that has imported everything already.

For tests of what a command or a script says and makes. What depends on how an interpreter starts, on what is imported,
or on several at work at once, needs ``subprocess``.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, TextIO

MODULES = ("numpy", "dask.array", "dask.threaded", "tifffile", "zarr", "numcodecs", "daskstack.api", "daskstack.cli")


def python(
    what: str, text: str, *arguments: object, cwd: Any = None, stdin: str = "", timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """What ``subprocess.run`` gives of ``python -m text``, ``python -c text`` or (``what`` is "") ``python text``."""
    server, answers = started()
    words = [what, text, *map(str, arguments)]
    with tempfile.TemporaryDirectory() as folder:
        files = [os.path.join(folder, name) for name in ("stdin", "stdout", "stderr")]
        for name, content in zip(files, (stdin, "", ""), strict=True):
            Path(name).write_text(content)
        request = {"words": words, "files": files, "cwd": str(cwd or Path.cwd()), "environ": dict(os.environ)}
        server.settimeout(timeout)  # what hangs fails this test, and all that come after it
        server.sendall(json.dumps(request).encode() + b"\n")
        status = int(answers.readline())
        return subprocess.CompletedProcess(words, status, *(Path(name).read_text() for name in files[1:]))


@functools.cache
def started() -> tuple[socket.socket, TextIO]:
    """Where the one server of these tests listens and answers; it ends when they do."""
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(
        [sys.executable, __file__, str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # threads and forks go ill together
    )
    theirs.close()
    answers = ours.makefile("r")

    def end() -> None:
        answers.close()
        ours.close()
        process.wait(timeout=60)

    atexit.register(end)
    return ours, answers


def serve(descriptor: int) -> list[str]:
    """Fork for each request and answer with its exit status; returns in the forks alone."""
    requests = socket.socket(fileno=descriptor)
    for line in requests.makefile("r"):
        pid = os.fork()
        if not pid:
            requests.detach()
            os.close(descriptor)
            return become(**json.loads(line))
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        requests.sendall(f"{status}\n".encode())
    os._exit(0)


def become(words: list[str], files: list[str], cwd: str, environ: dict[str, str]) -> list[str]:
    """The process that was asked for, in all that comes before its first line."""
    for k, name in enumerate(files):
        opened = os.open(name, os.O_RDONLY if k == 0 else os.O_WRONLY)
        os.dup2(opened, k)
        os.close(opened)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    sys.path[0] = os.path.dirname(os.path.abspath(words[1])) if words[0] == "" else ""
    sys.argv = [words[0] or words[1], *words[2:]]
    return words


def execute(what: str, text: str) -> None:
    if what == "-m":
        runpy.run_module(text, run_name="__main__", alter_sys=True)
    elif what == "-c":
        main = sys.modules["__main__"] = type(sys)("__main__")
        exec(text, vars(main))
    else:
        runpy.run_path(text, run_name="__main__")


def leave(status: str | int | None) -> None:
    """What an interpreter does at its end, but for the tearing down of every module, which takes longer than all else."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if isinstance(status, str):
        sys.stderr.write(f"{status}\n")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else int(status is not None))


if __name__ == "__main__":
    for module in MODULES:
        importlib.import_module(module)
    gc.freeze()  # what is shared stays shared
    status: str | int | None = 0
    try:
        execute(*serve(int(sys.argv[1]))[:2])
    except SystemExit as exc:
        status = exc.code
    leave(status)
