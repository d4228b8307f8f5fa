"""A Slurm of shell scripts: `squeue` prints rows that a test wrote, `scancel` and `sbatch` take note."""

import shlex
import time
from pathlib import Path

import pytest

from dagster_rayslurm.ssh.local import LocalConnection

_SQUEUE = """\
#!/bin/sh
echo x >>{base}/squeue-calls
for word; do case $word in --format=*) mark=${{word#--format=}}; mark=${{mark%%\x1f*}} ;; esac; done
cat {base}/queue/* 2>/dev/null | sed "s/^/$mark/"
"""
_SCANCEL = """\
#!/bin/sh
for word; do case $word in -*) ;; *) echo "$word" >>{base}/cancelled; rm -f {base}/queue/$word ;; esac; done
"""
_SBATCH = """\
#!/bin/sh
echo x >>{base}/sbatch-calls
echo 70
"""


class FakeSlurm:
    """Programs of Slurm on the PATH of this machine.

    Args:
        base: a directory of its own.
        monkeypatch: puts the programs on the PATH.
    """

    def __init__(self, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.base = base
        self.connection = LocalConnection()
        (base / "queue").mkdir(parents=True)
        (base / "bin").mkdir()
        for name, text in {"squeue": _SQUEUE, "scancel": _SCANCEL, "sbatch": _SBATCH}.items():
            program = base / "bin" / name
            program.write_text(text.format(base=shlex.quote(str(base))))
            program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{base}/bin:/usr/bin:/bin")

    def job(
        self, job_id: int, name: str, state: str = "RUNNING", reason: str = "None", nodes: str = "c1", start: float = 0
    ) -> None:
        """Put a job in the queue, or change it there."""
        fields = (job_id, job_id, state, reason, round(start) or "N/A", round(time.time()), 1, nodes, "p", name)
        (self.base / "queue" / str(job_id)).write_text("\x1f" + "\x1f".join(map(str, fields)) + "\n")

    @property
    def cancelled(self) -> list[str]:
        """What scancel was called with, options aside."""
        path = self.base / "cancelled"
        return path.read_text().split() if path.exists() else []

    @property
    def asked(self) -> int:
        """How often squeue was called."""
        return self._calls("squeue")

    @property
    def submitted(self) -> int:
        """How often sbatch was called; it takes every job as number 70."""
        return self._calls("sbatch")

    def _calls(self, program: str) -> int:
        path = self.base / f"{program}-calls"
        return len(path.read_text().split()) if path.exists() else 0
