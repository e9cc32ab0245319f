"""Batch scripts for SLURM, as text: an array of parts, or one scheduler with workers."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence

from daskstack.errors import UsageError
from daskstack.jobs import LOOPBACK, Jobs, interfaces
from daskstack.plan import parse_nbytes

ARRAY = """\
#!/bin/bash
# {jobs} parts of one build, each a job of its own, and a last job that does what is missing and publishes.
#   submit             bash THIS_FILE
#   look               squeue --me; tail daskstack-*.out
#   after a time limit the same again: what is on the disk stays
set -euo pipefail
cd {folder}

parts=$(sbatch --parsable <<'JOB'
#!/bin/bash
#SBATCH --job-name=daskstack --array=0-{last}
#SBATCH --output=daskstack-%A_%a.out
{directives}
exec {command} --part "$SLURM_ARRAY_TASK_ID/{jobs}"
JOB
)
last=$(sbatch --parsable --dependency="afterany:${{parts%%;*}}" <<'JOB'
#!/bin/bash
#SBATCH --job-name=daskstack
#SBATCH --output=daskstack-%A.out
{directives}
exec {command}
JOB
)
echo "parts: job $parts; last: job $last"
"""

SCHEDULER = """\
#!/bin/bash
# One job: a Dask scheduler, {jobs} workers, and the build, which waits for them.
#   submit             sbatch THIS_FILE
#   look               squeue --me; tail daskstack-*.out
#   after a time limit the same again: what is on the disk stays
#SBATCH --job-name=daskstack --ntasks={jobs}
#SBATCH --output=daskstack-%j.out
{directives}
cd {folder} || exit

keys=$(mktemp -d "$PWD/.daskstack.XXXXXX") || exit   # for its owner alone, on a file system that all nodes share
scratch=$(mktemp -d) || exit
trap 'kill $(jobs -p) 2>/dev/null; wait; rm -rf "$keys" "$scratch"' EXIT

# Traffic is encrypted, and only who has the key can connect.
(umask 077 && openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 30 -subj /CN=daskstack \\
  -keyout "$keys/key.pem" -out "$keys/cert.pem" 2>/dev/null) || exit
export DASK_DISTRIBUTED__COMM__REQUIRE_ENCRYPTION=True
export DASK_DISTRIBUTED__COMM__TLS__CA_FILE="$keys/cert.pem"
for role in SCHEDULER WORKER CLIENT; do
  export "DASK_DISTRIBUTED__COMM__TLS__${{role}}__KEY=$keys/key.pem"
  export "DASK_DISTRIBUTED__COMM__TLS__${{role}}__CERT=$keys/cert.pem"
done

listen="--interface {interface} --protocol tls --dashboard-address {loopback} --scheduler-file $keys/scheduler.json"
{python} -m distributed.cli.dask_scheduler $listen --port 0 &
srun {python} -m distributed.cli.dask_worker $listen --nthreads {cores} --memory-limit {limit} \\
  --local-directory "$scratch" &
{command} --scheduler "$keys/scheduler.json" --wait 120
"""


def script(jobs: Jobs, arguments: Sequence[str], *, way: str) -> str:
    """A batch script for a build.

    Parameters
    ----------
    jobs : Jobs
        How many, and what each is given.
    arguments : sequence of str
        Of ``daskstack build``.
    way : {"array", "scheduler"}
        Parts of their own, or one scheduler with workers.

    Raises
    ------
    UsageError
        Something is missing that the way needs.

    Examples
    --------
    >>> text = script(Jobs("slurm", 4, cores=8, memory="16 GB"), ["frames", "train.npy"], way="array")
    >>> [line for line in text.splitlines() if "--array" in line]
    ['#SBATCH --job-name=daskstack --array=0-3']
    """
    cores = jobs.cores or 1
    if way == "scheduler" and (jobs.interface is None or jobs.memory is None):
        missing = "interface" if jobs.interface is None else "memory"
        raise UsageError(
            f"way={way} without {missing}", f"--interface NAME (here: {interfaces()}), --memory SIZE of each worker"
        )
    python = shlex.quote(sys.executable)
    memory = parse_nbytes(jobs.memory) if jobs.memory is not None else None
    return {"array": ARRAY, "scheduler": SCHEDULER}[way].format(
        jobs=jobs.jobs,
        last=jobs.jobs - 1,
        folder=shlex.quote(os.getcwd()),
        directives="\n".join(_directives(jobs, cores, memory)),
        command=f"{python} -m daskstack build {shlex.join(arguments)}",
        python=python,
        interface=shlex.quote(jobs.interface or ""),
        loopback=LOOPBACK,
        cores=cores,
        limit=None if memory is None else f"{memory * 9 // 10}B",
    )


def _directives(jobs: Jobs, cores: int, memory: int | None) -> list[str]:
    """What each job, or each worker of the one job, is given."""
    given = {"time": jobs.walltime, "partition": jobs.queue, "account": jobs.account}
    lines = [f"#SBATCH --{name}={value}" for name, value in given.items() if value is not None]
    lines += [f"#SBATCH --cpus-per-task={cores}"]
    lines += [f"#SBATCH --mem-per-cpu={-(-memory // (cores << 20))}M"] if memory is not None else []
    return [*lines, *(f"#SBATCH --{name}={value}" for name, value in jobs.options.items())]
