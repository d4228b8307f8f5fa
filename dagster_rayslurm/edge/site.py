"""Facts of a cluster for `rayslurm doctor`, collected on the edge node in one call: the machine, the login shell, Slurm."""

import grp
import os
import pwd
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from . import base_directory, files, machine, processes, slurm

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

_PROGRAMS = ("sbatch", "srun", "squeue", "scancel", "sinfo", "scontrol", "sacct", "sacctmgr")
_SHELL_TIMEOUT = 30.0  # Seconds for the start-up files of the login shell.


def survey(base: str, questions: "Mapping[str, Sequence[Any]]", timeout: float) -> "dict[str, Any]":
    """Return a dict with facts about the edge node, and with the answers of commands of Slurm that run in parallel.

    Args:
        base: the base directory; a "~" at the beginning stands for the home directory.
        questions: the commands of Slurm by name. Each value is a list of a command, the standard input of the command as text,
            and the names of the `SBATCH_*` variables that the command may see.
        timeout: seconds that each command may take.

    The dict has these keys:
        machine: the result of `machine.look`.
        shell: the result of a command in the login shell, see `_shell`.
        programs: the result of `programs`.
        groups: the names of the user's Unix groups; the number of a group without a name.
        answers: for each name in `questions`, a list of the exit code (None if the command took too long), the output, the error
            output, and the duration in seconds; for the name "version", the same for `sbatch --version`.
    """
    answers = {}  # type: dict[str, Any]

    def ask(name: str, command: "Sequence[str]", stdin: str, keep: "Sequence[str]") -> None:
        began = time.monotonic()
        code, out, error = slurm.run(command, stdin.encode(), timeout, keep)
        texts = [text.decode("utf-8", "replace") for text in (out, error)]
        answers[name] = [code, *texts, time.monotonic() - began]

    # This command runs alone first, because it may look for Slurm's programs with a login shell.
    ask("version", ["sbatch", "--version"], "", [])
    threads = [
        threading.Thread(target=ask, args=(name, *question), name="survey-" + name) for name, question in questions.items()
    ]
    for thread in threads:
        thread.start()
    groups = [base_directory.name_of(grp.getgrgid, number) for number in os.getgroups()]
    facts = {"machine": machine.look(expand(base)), "shell": _shell(), "programs": programs(), "groups": groups}
    for thread in threads:
        thread.join()
    return dict(facts, answers=answers)


def expand(base: str) -> str:
    """Return a path with the user's home directory in place of "~"."""
    return os.path.normpath(os.path.join(files.home(), base[2:])) if base.startswith("~/") else os.path.expanduser(base)


def programs() -> "dict[str, str]":
    """Return the path of each program of Slurm, as `slurm.run` would find the program; "" for a missing program."""
    path = slurm.search_path(slurm.login_environment())
    return {name: shutil.which(name, path=path) or "" for name in _PROGRAMS}


def _shell() -> "dict[str, Any]":
    """Run `true` in the user's login shell, as `ssh HOST true` would; returns a dict with the result.

    The dict has the `path` of the shell, the duration in `seconds`, the exit code `code` (None if the shell took too long), and
    the texts `out` and `error`, which start-up files print to the standard output and the error output. If this process was not
    started by SSH, the shell is not run: `seconds` and `code` are 0, and the texts are "".

    The shell starts without the variable SHLVL, so that bash reads ~/.bashrc as bash does for `ssh HOST true`. To run a command,
    bash reads this file only if SSH_CLIENT is set, and SHLVL is less than 2 (bash(1)).
    """
    environ = dict(os.environ)
    environ.pop("SHLVL", None)
    shell = pwd.getpwuid(os.getuid()).pw_shell or "/bin/sh"
    if "SSH_CONNECTION" not in environ:  # Without SSH there is no login that could print.
        return {"path": shell, "seconds": 0.0, "code": 0, "out": "", "error": ""}
    began = time.monotonic()
    code, out, error = processes.run([shell, "-c", "true"], b"", _SHELL_TIMEOUT, environ, files.home())
    out_text, error_text = (text.decode("utf-8", "replace")[:500] for text in (out, error))
    return {"path": shell, "seconds": time.monotonic() - began, "code": code, "out": out_text, "error": error_text}


def probe_state(run_dir: str, nodes: int) -> "list[dict[str, Any] | None]":
    """Return the latest facts of each node of a probe, a job of `rayslurm doctor` on compute nodes, in the order of the ranks.

    The facts are None for a node that has written no facts yet. `run_dir` is the directory of the probe, and `nodes` is the
    number of nodes.
    """
    found = []  # type: list[dict[str, Any] | None]
    for rank in range(nodes):
        found.append(machine.last_line(files.read(os.path.join(run_dir, machine.FACTS % rank), 0, 1024 * 1024)))
    return found


def reach_and_measure(run_dir: str, nodes: "list[dict[str, Any]]", patience: float) -> "dict[str, Any]":
    """Connect to each node of a probe, and measure how late the nodes see a change of a file in the probe's directory `run_dir`.

    A probe is a job of `rayslurm doctor` on compute nodes. `nodes` has the facts that each node has written. The function waits
    up to `patience` seconds until the nodes have answered the change. Returns a dict of three lists with an entry for each node:
        reached: the result of `machine.reach`; an empty dict if the node listens on no port. If a network interface is
            configured, `by_interface` in the dict is the result of `machine.reach` for the address of this interface.
        lags: the seconds from the change until the node's answer is seen on this machine; None without an answer.
        skews: the seconds by which the node's clock is ahead of this machine's clock, exact to half of the lag; 0.0 without an
            answer.
    """
    with ThreadPoolExecutor(max(1, len(nodes))) as pool:  # A firewall that drops packets costs seconds for each address.
        reached = list(pool.map(_reached, nodes))
    began, at = time.monotonic(), time.time()
    with open(os.path.join(run_dir, machine.GO), "ab", 0) as file:
        file.write(b"1")
        os.fsync(file.fileno())
    lags, skews = [None] * len(nodes), [0.0] * len(nodes)  # type: list[float | None], list[float]
    while None in lags and time.monotonic() - began < patience:
        for rank, lag in enumerate(lags):
            answer = b"" if lag is not None else files.read(os.path.join(run_dir, machine.SEEN % rank), 0, 100)
            if answer.endswith(b"\n"):
                seconds = time.monotonic() - began
                lags[rank], skews[rank] = seconds, float(answer) - at - seconds / 2
        time.sleep(0.01)
    return {"reached": reached, "lags": lags, "skews": skews}


def _reached(node: "dict[str, Any]") -> "dict[str, Any]":
    """Connect to one node of a probe, whose facts are `node`; the docstring of `reach_and_measure` describes the result."""
    if not node["listens"]:
        return {}
    port = node["listens"][0]
    found = machine.reach(node, port)
    if "address" in (node.get("interface") or {}):
        found["by_interface"] = machine.reach(node, port, True)
    return found
