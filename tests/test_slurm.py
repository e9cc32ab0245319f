"""Jobs of a real SLURM as workers: the same bytes, nothing open, nothing left, whatever is killed."""

from __future__ import annotations

import os
import re
import signal
import socket
import ssl
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import slowly
from conftest import Array, Run, image, need_root, same
from slurmkit import Slurm, listeners, need_slurm, until

from daskstack import build, receipts
from daskstack.errors import DaskstackError, UsageError
from daskstack.jobs import make_jobs

TESTS = Path(__file__).parent
JOBS = ("--cluster", "slurm", "--interface", "lo", "--cores", "1", "--memory", "1GB", "--walltime", "5")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    need_slurm()
    made = Slurm(tmp_path_factory.mktemp("slurm"))
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.fixture
def work(slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder, the current one, with the .npy files 0 to 39 in ``in``; what is started there finds SLURM."""
    monkeypatch.chdir(tmp_path)
    for name, value in slurm.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLOWLY", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]))
    make_files(40)
    yield tmp_path
    until(lambda: not slurm.jobs(), "an empty queue")


def make_files(count: int) -> None:
    Path("in").mkdir(exist_ok=True)
    for k in range(count):
        np.save(f"in/{k}.npy", image(k))


HASTY = """
import slowly, daskstack, daskstack.hosts, daskstack.jobs, daskstack.run
from daskstack.hosts import Hosts
from daskstack.progress import Progress

daskstack.jobs.LOST_AFTER = 1.0
daskstack.jobs.ASK_EVERY = daskstack.jobs.LOOK_EVERY = daskstack.run.LOOK_EVERY = 0.5
first, update = Hosts.await_first, Progress.update

def await_first(self):
    first(self)
    self.wait = {wait}

def told(*arguments):
    update(*arguments)
    with open("gathered", "a") as gathered:
        gathered.write("x")

Hosts.await_first, Progress.update = await_first, told
print(daskstack.build("in", {out!r}, reader=slowly.read, cluster="slurm", jobs=2, cores=1, memory="1GB",
                      interface="lo", wait=60, **{options!r}))
"""


def launched(out: str, wait: int = 60, **options: Any) -> subprocess.Popen[str]:
    """A build on two jobs, in a process of its own, with the reader that can be held, which looks at its workers often;
    later it waits so long for one.
    """
    script = HASTY.format(out=out, wait=wait, options={"walltime": "5"} | options)
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> str:
    """What a build printed; it succeeded."""
    out, err = process.communicate(timeout=150)
    assert process.returncode == 0, err
    return out


def told() -> Counter[int]:
    """How often workers have read each file."""
    lines = [line.split() for line in Path(slowly.TOLD).read_text().splitlines()]
    return Counter(int(number) for number, node in lines if node != "None")


def receipts_of(names: set[str] | None = None) -> set[int]:
    """Blocks with a receipt, in files of these names."""
    found = set()
    for path in Path().glob(f"*.part/*/*/{receipts.FOLDER}/*"):
        if names is None or path.name in names:
            found |= {int(k) for k in re.findall(r'"block":(\d+),', path.read_text())}
    return found


def receipt_files() -> set[str]:
    return {path.name for path in Path().glob(f"*.part/*/*/{receipts.FOLDER}/*")}


def gathered() -> int:
    """How many blocks the client knows to be done."""
    return os.path.getsize("gathered") if os.path.exists("gathered") else 0


def hold(number: int) -> None:
    """Have files from this number on wait."""
    new = Path(f"{slowly.HOLD}.new")
    new.write_text(str(number))
    new.replace(slowly.HOLD)


def expected(count: int) -> Array:
    return np.stack([image(k) for k in range(count)])


def test_jobs_make_what_threads_make_with_nothing_open_beyond_loopback(slurm: Slurm, work: Path) -> None:
    make_files(3000)
    hold(1)  # the first header is the client's to read
    process = launched("out.zarr", files_per_block=50)
    until(lambda: len(listeners(slurm.processes())) >= 6, "two workers")
    assert {name.split(":")[0] for name in listeners([*slurm.processes(), process.pid])} == {"127.0.0.1"}

    keys = [path for path in work.rglob(".dask-jobqueue*") if path.is_file()]
    assert len(keys) == 3
    assert {path.stat().st_mode & 0o777 for path in keys} == {0o600}
    assert {path.parent.stat().st_mode & 0o777 for path in keys} == {0o700}

    commands = [Path(f"/proc/{pid}/cmdline").read_text() for pid in slurm.processes()]
    found = next(filter(None, (re.search(r"tls://127\.0\.0\.1:(\d+)", command) for command in commands)))
    anybody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection(("127.0.0.1", int(found[1])), 20) as plain,
        anybody.wrap_socket(plain) as encrypted,
        pytest.raises(ssl.SSLError, match="CERTIFICATE_REQUIRED"),
    ):
        encrypted.recv(1)

    os.unlink(slowly.HOLD)
    report = ended(process)
    assert re.search(r"^ +n1: \d+ blocks.*\n +n2: \d+ blocks", report, re.MULTILINE)
    build("in", "threads.zarr", scheduler="threads", progress=False, files_per_block=50)
    ours, theirs = (
        {p.relative_to(out): p.read_bytes() for p in Path(out, "data").rglob("*") if p.is_file()}
        for out in ("out.zarr", "threads.zarr")
    )
    assert ours == theirs
    assert set(os.listdir()) & {"out.zarr.part", "slurm-1.out"} == set()


def test_jobs_and_processes_that_are_killed_cost_only_their_unfinished_blocks(slurm: Slurm, work: Path) -> None:
    make_files(3000)
    block = 75  # files
    hold(10 * block)
    process = launched("out.npy", files_per_block=block)
    until(lambda: gathered() == 10, "10 blocks")
    slurm.run("scancel", slurm.jobs()[0])
    hold(20 * block)
    until(lambda: gathered() == 20, "20 blocks")
    until(lambda: len(listeners(slurm.processes())) >= 6, "the job's replacement")
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in slurm.processes()}
    os.kill(next(pid for pid, command in commands.items() if "multiprocessing" in command), signal.SIGKILL)
    os.kill([pid for pid, command in commands.items() if "distributed.cli.dask_worker" in command][-1], signal.SIGKILL)
    hold(30 * block)
    until(lambda: gathered() == 30, "30 blocks")
    first, files = slurm.jobs(), receipt_files()
    slurm.run("scancel", *first)
    hold(32 * block)  # what the jobs are at, they finish before they end
    until(lambda: not set(first) & set(slurm.jobs()), "the end of the jobs")
    done = receipts_of(files)
    os.unlink(slowly.HOLD)
    report = ended(process)
    assert "done  out.npy (3000, 5, 7) uint16" in report
    assert re.search(r"^ +n1: \d+ blocks.*\n +n2: \d+ blocks", report, re.MULTILINE)
    build("in", "threads.npy", scheduler="threads", progress=False, files_per_block=block)
    assert Path("out.npy").read_bytes() == Path("threads.npy").read_bytes()
    times = told()
    assert times.keys() == set(range(3000))
    assert {times[k * block] for k in {*range(10), *done} - set(range(10, 30))} == {1}
    assert sum(times[k * block] for k in range(40)) <= 55  # of the others only what was at work at one of the kills
    until(lambda: not slurm.processes(), "the end of what the killed nanny left")


def test_a_run_without_workers_ends_and_what_a_killed_client_leaves_goes_on(slurm: Slurm, work: Path) -> None:
    hold(10)
    process = launched("out.npy", files_per_block=1, wait=4)
    until(lambda: len(receipts_of()) == 10, "10 blocks")
    slurm.run("scontrol", "update", "partitionname=main", "state=down")
    try:
        slurm.run("scancel", *slurm.jobs())
        _, err = process.communicate(timeout=60)
        assert process.returncode == 1
        assert re.search(r"DaskstackError: there has been no worker for 4 seconds; squeue: ", err)
        assert re.search(r"\n1\d of 40 blocks are safe in out\.npy\.part", err)

        hold(20)
        process = launched("out.npy", files_per_block=1)
        until(lambda: len(slurm.jobs()) == 2, "two jobs")
        cancelled, other = slurm.jobs()
        slurm.run("scancel", cancelled)
        until(
            lambda: len({*slurm.jobs()} - {cancelled, other}) == 1, "another job in place of the one without a worker"
        )
    finally:
        slurm.run("scontrol", "update", "partitionname=main", "state=up")
    until(lambda: len(receipts_of()) >= 20, "20 blocks")
    process.kill()
    process.communicate()
    os.unlink(slowly.HOLD)  # what the workers are at, they finish
    until(lambda: not slurm.jobs(), "the end of the jobs")
    done = receipts_of()
    assert list(work.rglob("jobs.*"))

    build("in", "out.npy", reader=slowly.read, files_per_block=1, cluster="slurm", jobs=1, cores=2, memory="1GB",
          interface="lo", progress=False)  # fmt: skip
    assert same(np.load("out.npy"), expected(40))
    assert {told()[k] for k in done} == {1}
    assert not list(work.rglob("jobs.*"))


def wrapped_python(mount: str) -> dict[str, str]:
    """A Python for jobs that begins in a mount namespace of its own."""
    path = Path("python.sh")
    path.write_text(f'#!/bin/sh\nexec unshare -m sh -c \'{mount} && exec "$@"\' sh {sys.executable} "$@"\n')
    path.chmod(0o755)
    return {"python": str(path.absolute())}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"queue": "nowhere"}, r"^the batch system refused the jobs: invalid partition specified: nowhere; "),
        ({"walltime": "2-0", "wait": 3}, r"no worker came within 3 seconds; squeue: job \d+ PENDING Partition"),
        ({"cores": 8, "memory": "800MB"}, r"the worker on n[12] has 590 MB for 8 threads"),
        ("mount -t tmpfs none in", r"the worker on n[12] cannot read in/0\.npy: No such file"),
        ("mount --bind . . && mount -o remount,ro,bind .", r"the worker on n[12] cannot write in out\.npy\.part/"),
        ("sleep 1; echo an error of its own; false", r"no worker came .* ends: an error of its own"),
        ({"interface": "none0"}, r"^cluster=slurm: 'none0' is not a valid network interface"),
        ({"interface": None}, r"^cluster=slurm: no network interface is named\nnext  --interface NAME; here: .*\blo\b"),
        (
            {"cluster_options": {"colour": "red"}},
            r"^cluster=slurm: Got unexpected keyword argument 'colour'\nnext  see",
        ),
    ],
)
def test_what_hinders_is_one_message_and_nothing_is_left(
    slurm: Slurm, work: Path, options: dict[str, Any] | str, message: str
) -> None:
    if isinstance(options, str):
        need_root("a mount namespace")
        options = {"cluster_options": wrapped_python(options), "wait": 5 if "false" in options else 60}
    if "cores" in options:
        for k in range(2):  # of blocks that are large
            np.lib.format.open_memmap(f"in/{k}.npy", mode="w+", shape=(50, 1000, 1000), dtype="uint16")
        for k in range(2, 40):
            os.unlink(f"in/{k}.npy")
    asked: dict[str, Any] = {"cores": 1, "memory": "1GB", "walltime": "5", "interface": "lo", "wait": 60, **options}
    with pytest.raises(DaskstackError, match=message) as caught:
        build("in", "out.npy", cluster="slurm", progress=False, **asked)
    assert str(caught.value).count("\nnext  ") == 1
    assert not [name for name in os.listdir() if name.startswith("out.npy")]
    assert not slurm.run("squeue", "-h", "-t", "PENDING,RUNNING")


def printed_script(daskstack: Run, *options: str) -> str:
    done = daskstack("sbatch", "in", "out.npy", "--files-per-block", "50", "--quiet", *options)
    assert done.returncode == 0, done.stderr
    Path("job.sh").write_text(done.stdout)
    return "job.sh"


def watched(slurm: Slurm, is_over: Callable[[], bool]) -> set[str]:
    """The hosts on which anything in a job has listened, until it is over."""
    found: set[str] = set()

    def look() -> bool:
        found.update(address.rpartition(":")[0] for address in listeners(slurm.processes()))
        return is_over()

    until(look, "the end of the jobs")
    return found


@pytest.mark.parametrize("way", ["array", "scheduler", "srun"])
def test_scripts_and_srun_make_what_threads_make(slurm: Slurm, work: Path, daskstack: Run, way: str) -> None:
    make_files(3000)
    if way == "array":
        script = printed_script(daskstack, "--jobs", "4", "--walltime", "5")
        assert re.fullmatch(r"parts: job \d+; last: job \d+\n", slurm.run("bash", script))
        assert watched(slurm, lambda: not slurm.jobs()) == set()
    elif way == "scheduler":
        script = printed_script(daskstack, "--way", way, "--jobs", "2", "--memory", "1GB", "--interface", "lo")
        assert slurm.run("sbatch", script).startswith("Submitted batch job ")
        assert watched(slurm, lambda: not slurm.jobs()) == {"127.0.0.1"}
    else:
        command = ["srun", "-n", "4", sys.executable, "-m", "daskstack", "build", "in", "out.npy", "--cluster", "srun",
                   "--files-per-block", "50"]  # fmt: skip
        with pytest.raises(
            UsageError, match="cluster=srun cannot encrypt its traffic\nnext  --insecure, or cluster=slurm"
        ):
            build("in", "out.npy", cluster="srun")
        command += ["--insecure", "--interface", "lo"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert watched(slurm, lambda: process.poll() is not None) == {"127.0.0.1"}
        out, err = process.communicate()
        assert process.returncode == 0, err
        assert out.count("done  out.npy") == 1
    build("in", "threads.npy", scheduler="threads", progress=False, files_per_block=50)
    logs = [path.read_text() for path in work.glob("*.out")]
    assert Path("out.npy").exists(), logs
    assert Path("out.npy").read_bytes() == Path("threads.npy").read_bytes()
    assert not [name for name in os.listdir() if name.startswith(".") or name.endswith(".part")]


@pytest.mark.long
def test_a_wall_time_that_is_shorter_than_the_work(slurm: Slurm, work: Path) -> None:
    hold(10)
    process = launched("out.npy", files_per_block=1, walltime="1")
    until(lambda: len(slurm.jobs()) == 2, "two jobs")
    first = slurm.jobs()
    until(lambda: len(receipts_of()) == 10, "10 blocks")
    until(lambda: not set(first) & set(slurm.jobs()), "the end of both by their wall time", 200)
    os.unlink(slowly.HOLD)
    assert "done  out.npy (40, 5, 7) uint16" in ended(process)
    assert same(np.load("out.npy"), expected(40))
    assert {told()[k] for k in range(10)} == {1}


def test_jobs_want_a_cluster_and_a_cluster_an_interface(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, daskstack: Run
) -> None:
    monkeypatch.chdir(tmp_path)
    make_files(2)
    with pytest.raises(UsageError, match=r"jobs, walltime without cluster\nnext  name it: slurm, pbs, lsf, sge, "):
        make_jobs(None, jobs=2, walltime="1")
    with pytest.raises(UsageError, match=r"cluster='slrum'\nnext  choose from: slurm, pbs"):
        make_jobs("slrum")
    with pytest.raises(UsageError, match="scheduler and cluster are both given"):
        build("in", "out.npy", cluster="slurm", scheduler="threads")
    done = daskstack("plan", "in", "out.npy", *JOBS, "--jobs", "3")
    assert "2 blocks of 1 file, in 3 jobs of slurm, at most " in done.stdout
    assert "memory a task" in done.stdout
    assert daskstack("plan", "in", "out.npy", "--jobs", "3").returncode == 2
    assert daskstack("plan", "in", "out.npy", *JOBS, "--cluster-option", "colour").returncode == 2
    assert daskstack("plan", "in", "out.npy", *JOBS, "--wait", "0").returncode == 2
    assert os.listdir() == ["in"]


@pytest.mark.filterwarnings("ignore:OAR Job memory")
@pytest.mark.parametrize("system", ["slurm", "pbs", "lsf", "sge", "oar", "moab", "htcondor"])
def test_each_batch_system_is_one_of_dask_jobqueue_s(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("distributed")
    need_slurm()
    from daskstack.jobs import _kind

    before = signal.getsignal(signal.SIGINT)
    kind = _kind(system)
    assert signal.getsignal(signal.SIGINT) is before
    disk = {"disk": "1GB"} if system == "htcondor" else {}
    job = kind.job_cls("tls://127.0.0.1:1", name="w", cores=4, memory="2GB", processes=2, interface="lo", **disk)
    assert f"--memory-limit {(2_000_000_000 - (200 << 20)) // 2}B" in job.job_script()
