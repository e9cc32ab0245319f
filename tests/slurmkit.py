"""A SLURM of its own for tests: munged, slurmctld and two slurmds, on loopback, under one folder, with no root needed."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel", "sinfo")
PATIENCE = 60.0  # seconds, as a guard against hanging

CONFIGURATION = """\
ClusterName=tests
SlurmctldHost={host}({address})
SlurmctldPort={ports[0]}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/socket
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
PlugStackConfig={folder}/plugstack.conf
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=5,bf_interval=5
KillWait=2
CompleteWait=0
InactiveLimit=0
ReturnToService=2
NodeName=n1 NodeHostname={host} NodeAddr={address} Port={ports[1]} CPUs=8 RealMemory=8000
NodeName=n2 NodeHostname={host} NodeAddr={address} Port={ports[2]} CPUs=8 RealMemory=8000
PartitionName=main Nodes=n[1-2] Default=YES DefaultTime=10 MaxTime=60 DefMemPerCPU=256 LLN=YES State=UP
"""


def need_slurm() -> None:
    """Skip where SLURM or dask-jobqueue is not installed; where everything must run, fail.

    One of the two passes in which everything must run is enough: that of the newest Python.
    """
    must = os.environ.get("CI") == "true"
    if must and sys.version_info < (3, 13):
        pytest.skip("SLURM is tested with the newest Python")
    path = os.environ["PATH"] + ":/usr/sbin:/sbin"
    missing = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    if find_spec("dask_jobqueue") is None:
        missing.append("dask-jobqueue")
    if missing:
        message = f"needs SLURM (apt-get install slurmctld slurmd slurm-client munge) and 'hpc': no {missing[0]}"
        if must:
            pytest.fail(message)
        pytest.skip(message)


class Slurm:
    """Two nodes, n1 and n2, of this one machine; ``folder`` must be short, since a socket lies in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.daemons: list[subprocess.Popen[bytes]] = []
        host = socket.gethostname().split(".")[0]
        address = socket.gethostbyname(host)
        user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
        (folder / "state").mkdir()
        (folder / "plugstack.conf").touch()
        (folder / "key").write_bytes(os.urandom(128))
        (folder / "key").chmod(0o600)
        text = CONFIGURATION.format(host=host, address=address, user=user, folder=folder, ports=free_ports(address, 3))
        (folder / "slurm.conf").write_text(text)
        env = os.environ | {"PATH": os.environ["PATH"] + ":/usr/sbin:/sbin"}
        version = subprocess.run(["slurmctld", "-V"], capture_output=True, text=True, check=True, env=env).stdout
        old = int(version.split()[1].split(".")[0]) < 23  # which knows no "disabled"
        (folder / "cgroup.conf").write_text(f"CgroupPlugin={'cgroup/v1' if old else 'disabled'}\n")
        self.env = {name: value for name, value in env.items() if not name.startswith("SLURM")}
        self.env["SLURM_CONF"] = str(folder / "slurm.conf")

    def start(self) -> None:
        self._daemon("munged", "--foreground", "--force", f"--key-file={self.folder}/key", f"--socket={self.folder}/socket",
                     f"--pid-file={self.folder}/munged.pid", f"--seed-file={self.folder}/seed",
                     f"--log-file={self.folder}/munged.log")  # fmt: skip
        until((self.folder / "socket").exists, "munged")
        self._daemon("slurmctld", "-D")
        for node in ("n1", "n2"):
            self._daemon("slurmd", "-D", "-N", node)
        until(lambda: self.run("sinfo", "-h", "-N", "-t", "idle", "-o", "%T").split() == ["idle"] * 2, "idle nodes")

    def _daemon(self, *command: str) -> None:
        with (self.folder / "output.log").open("ab") as output:
            process = subprocess.Popen(command, env=self.env, stdout=output, stderr=output, stdin=subprocess.DEVNULL,
                                       start_new_session=True)  # fmt: skip
        self.daemons.append(process)

    def run(self, *command: str) -> str:
        """What a command of SLURM's prints; nothing where it fails."""
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, check=False, timeout=PATIENCE)
        return done.stdout if done.returncode == 0 else ""

    def jobs(self) -> list[str]:
        """The jobs that are not over."""
        return self.run("squeue", "-h", "-o", "%A").split()

    def processes(self) -> list[int]:
        """What runs in jobs now, SLURM's own programs apart: what has this SLURM in its environment, and a job."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    names = (entry / "environ").read_bytes().split(b"\0")
                    own = (entry / "comm").read_text().strip() in ("srun", "slurmstepd")
                except OSError:  # it is over, or somebody else's
                    continue
                if not own and f"SLURM_CONF={self.folder}/slurm.conf".encode() in names:
                    found += [int(entry.name)] if any(n.startswith(b"SLURM_JOB_ID=") for n in names) else []
        return found

    def stop(self) -> None:
        for job in self.jobs():
            self.run("scancel", job)
        until(lambda: not self.jobs(), "an empty queue")
        for process in reversed(self.daemons):
            process.terminate()
            process.wait(timeout=PATIENCE)


def free_ports(address: str, count: int) -> list[int]:
    sockets = [socket.create_server((address, 0)) for _ in range(count)]
    ports = [int(s.getsockname()[1]) for s in sockets]
    for s in sockets:
        s.close()
    return ports


def until(met: Callable[[], object], what: str, seconds: float = PATIENCE) -> None:
    """Wait for something, but not for ever."""
    end = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.1)


def listeners(pids: Sequence[int]) -> list[str]:
    """The addresses on which processes listen."""
    found = subprocess.run(["ss", "-ltnp"], capture_output=True, text=True, check=True).stdout
    return [line.split()[3] for line in found.splitlines() if any(f"pid={pid}," in line for pid in pids)]
