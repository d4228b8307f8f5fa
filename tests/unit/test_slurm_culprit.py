"""Which component of a job sbatch has refused, asked of programs that answer as Slurm's do."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dagster_rayslurm.slurm.component_probe import Findings, ask, findings
from dagster_rayslurm.slurm.queue import ClusterClock
from dagster_rayslurm.slurm.request import JobRequest
from dagster_rayslurm.slurm.submit import SubmissionRefused, submit
from dagster_rayslurm.ssh.base import Completed, ConnectionLost
from dagster_rayslurm.ssh.local import LocalConnection

SBATCH = """#!/bin/sh
printf '%s\\n' "$1" >>"$ASKED"
case $1 in --test-only) script=$(cat) ;; *) script=$(cat "$2") ;; esac
case "in ${SBATCH_PARTITION-none}; $script" in
    *gpus-per-node=64* | "in none; "*gpus-per-node*)
        echo "sbatch: error: Batch job submission failed: Requested node configuration is not available" >&2
        exit 1 ;;
esac
echo "sbatch: Job 5 to start at 2026-01-01T00:00:00" >&2
echo 5
"""
"""What has GPUs in another partition than the default one, and not so many."""
SINFO = "#!/bin/sh\necho compute\necho gpu\n"
TROUBLE = "#!/bin/sh\necho 'sbatch: error: Unable to contact slurm controller' >&2\nexit 1\n"


def request(first: int | None, second: int | None, **fields: Any) -> JobRequest:
    """A job of two components with so many GPUs."""
    other = JobRequest("job", "it's", gpus_per_node=second, component_id="b", **fields)
    return JobRequest("job", "it's", gpus_per_node=first, component_id="a", others=(other,), **fields)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where sbatch and sinfo are; `asked` has the first argument of each sbatch."""
    for name, text in (("sbatch", SBATCH), ("sinfo", SINFO), ("squeue", "#!/bin/sh\n"), ("sacct", "#!/bin/sh\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("ASKED", str(tmp_path / "asked"))
    monkeypatch.delenv("SBATCH_PARTITION", raising=False)
    return tmp_path


class Dropping(LocalConnection):
    """A connection that drops in the one question about components."""

    def run(self, command: Sequence[str], stdin: bytes = b"", timeout: float | None = None) -> Completed:
        if list(command) == ["sh", "-s"]:
            raise ConnectionLost("the connection was lost")
        return super().run(command, stdin, timeout)


def test_the_component_that_is_refused_alone_in_one_command(programs: Path) -> None:
    asked = request(None, 64)
    found = ask(LocalConnection(), asked, [], "/run dir", alone=True)
    assert found.partitions == ("compute", "gpu") and found.about == asked.others[0]
    assert "Requested node configuration" in found.said and (programs / "asked").read_text().split() == ["--test-only"] * 2
    assert ask(LocalConnection(), asked, [], "/run", alone=False) == Findings(("compute", "gpu"))
    assert ask(LocalConnection(), request(None, None), [], "/run", alone=True).about is None


def test_variables_of_sbatch_count_as_they_did_for_the_whole_job(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them the first component would be refused, too."""
    monkeypatch.setenv("SBATCH_PARTITION", "gpu")
    with pytest.raises(SubmissionRefused) as caught:
        send(LocalConnection(), programs, request(2, 64))
    assert str(caught.value).startswith("component 'b': ") and caught.value.about is not None
    # What one component says of its partition stands for none of the variables.
    with pytest.raises(SubmissionRefused) as caught:
        send(LocalConnection(), programs, request(2, 64, partition="compute"))
    assert str(caught.value).startswith("component 'a': ")


def test_slurm_that_answers_nothing_blames_nobody(programs: Path) -> None:
    (programs / "sbatch").write_text(TROUBLE)
    (programs / "sinfo").write_text("#!/bin/sh\nexit 1\n")
    assert ask(LocalConnection(), request(None, 64), [], "/run", alone=True) == Findings()
    assert findings("", request(None, 64), "mark") == Findings()


def test_a_drop_while_the_component_is_looked_for_changes_no_refusal(programs: Path) -> None:
    """Nothing is submitted again, and nothing looked for: the job was refused for sure."""
    with pytest.raises(SubmissionRefused, match="Slurm refused the job") as caught:
        send(Dropping(), programs, request(None, 64))
    assert caught.value.about is None and not caught.value.retry
    assert (programs / "asked").read_text().split() == ["--parsable"]


def send(commands: LocalConnection, place: Path, asked: JobRequest) -> None:
    script = "\n".join(f"#SBATCH --gpus-per-node={part.gpus_per_node}" for part in asked.parts if part.gpus_per_node)
    warnings: list[str] = []
    files = {"job.sh": f"#!/bin/sh\n{script}\n".encode()}
    submit(commands, str(place / "runs" / "one"), files, asked, ClusterClock(commands), warnings.append)
