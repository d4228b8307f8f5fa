"""Makes a copy of the Python environment on this node's own disk, for jobs whose environment has stage="node-local".

If its files were only copied, the environment would not work at the new path, because many of the files contain the old path. So
each node builds its copy with the commands that built the environment on the shared file system. The commands install the same
packages, which lie on the shared file system. Each node then reads a few large files from the shared file system instead of
thousands of small ones.

The runtime starts with the Python of the shared environment, makes the copy, and then replaces its own program by the copy's
Python (`os.execve`). So Ray and payloads use the copy too. At the end of the job, the keeper (`process.processes`) removes the
copy.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from ..process import processes, scratch

_RECIPE = "rayslurm.json"  # File in the shared environment with the commands that make a copy; `edge.environment` writes it.
_PREFIX = "{prefix}"  # Stands in these commands for the path of the copy.
_ROOM = 1.1  # Free bytes that a disk must have for each byte of the environment.
_TIMEOUT = 300.0  # Seconds for one command.
_REMARK = "RAYSLURM_NODE_LOCAL"  # Environment variable with the `remark` from before this process became the copy's Python.
_MOST_REMARKS = 8  # Most nodes whose remarks a log shows.
NO_COPY = "not-node-local"  # The phase of `remark` if no copy could be made.
_SCRUBBED = ("UV_", "PIP_", "PYTHON", "VIRTUAL_ENV")  # Prefixes of variables that would change the commands' work.

# The phase and the sentence for the Dagster log about this node's copy of the environment; None if nodes make no copies.
remark: Optional[Tuple[str, str]] = None


def enter(arguments: Sequence[str]) -> None:
    """If the Python environment is to be copied to each node's disk, make the copy and go on with the copy's Python.

    To go on, the function replaces this program by the copy's Python (`os.execve`), which runs this zipapp again with the
    command-line arguments `arguments`. The function returns, and this program goes on in its present environment, in three cases:
    the environment's recipe asks for no copies, the copy cannot be made, or this environment is the copy already.
    """
    global remark
    scratch.inherit()
    said = os.environ.pop(_REMARK, "")
    remark = ("node-local", said) if said else None
    prefix, recipe = _find(sys.executable)
    if not recipe.get("node_local"):
        return
    node, began = os.environ.get("SLURMD_NODENAME") or os.uname().nodename, time.monotonic()
    place = None
    # A signal must not leave half a copy behind. The program that this process becomes handles it in its own way.
    before = signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))
    processes.become_subreaper()  # So that `kill_descendants` finds what the commands have started.
    try:
        scratch.sweep()  # Copies of killed jobs take up room.
        place = scratch.Scratch(int(recipe["bytes"] * _ROOM))
        copy = place.join("environment")
        python = os.path.join(copy, os.path.relpath(sys.executable, prefix))
        _make(recipe["node_local"], copy, python, place.path)
        said = "node %s made its own copy in %.1f s, %s" % (node, time.monotonic() - began, copy)
        print("rayslurm: " + said, file=sys.stderr, flush=True)
        environ = dict(_moved(os.environ, prefix, copy), **place.outlive_exec())
        os.execve(python, [python, "-I", sys.argv[0], *arguments], dict(environ, **{_REMARK: said}))
    except OSError as error:
        why = error.strerror or str(error)
        remark = NO_COPY, "node %s uses the shared environment, as it cannot be copied: %s" % (node, why)
        print("rayslurm: " + remark[1], file=sys.stderr, flush=True)
        signal.signal(signal.SIGTERM, before)
        if place is not None:
            place.remove()
    except BaseException:
        processes.kill_descendants(os.getpid(), collect=processes.reap)
        if place is not None:
            place.remove()
        raise


def _find(python: str) -> Tuple[str, Dict[str, Any]]:
    """Returns the directory of the Python environment of the executable `python`, and the environment's recipe.

    The recipe is the content of the file `rayslurm.json` in this directory, with the commands that make a copy; {} if there is no
    such file, or if it cannot be read.
    """
    prefix = os.path.dirname(os.path.dirname(python))
    for path in (prefix, os.path.dirname(prefix)):  # pixi-pack makes `env/bin/python`.
        try:
            with open(os.path.join(path, _RECIPE), encoding="utf-8") as file:
                recipe = json.load(file)
        except (OSError, ValueError):
            continue
        if isinstance(recipe, dict):
            return path, recipe
    return prefix, {}


def _make(commands: Sequence[Sequence[str]], copy: str, python: str, temporary: str) -> None:
    """Make a copy of the environment at the path `copy`, which must not exist, and test that the copy's executable `python` runs.

    `commands` are run one after another; each is a list of words, in which "{prefix}" stands for `copy`. `temporary` is the
    directory for temporary files. Raises OSError if `copy` exists, or if a command fails or runs longer than `_TIMEOUT` seconds.
    """
    os.mkdir(copy)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(_SCRUBBED)}
    # Files that uv unpacks there need not be copied into the environment, they are linked.
    environ["TMPDIR"] = temporary
    for command in [*commands, [python, "-I", "-c", ""]]:
        words, nothing = [word.replace(_PREFIX, copy) for word in command], subprocess.DEVNULL
        try:
            subprocess.run(
                words, check=True, cwd=copy, env=environ, stdin=nothing, stdout=nothing, stderr=subprocess.PIPE, timeout=_TIMEOUT
            )
        except subprocess.TimeoutExpired:
            raise OSError("%s took over %g s" % (os.path.basename(words[0]), _TIMEOUT)) from None
        except subprocess.CalledProcessError as error:
            text = " ".join(error.stderr.decode("utf-8", "replace").split())[-500:]
            raise OSError(text or "%s ended with exit code %d" % (os.path.basename(words[0]), error.returncode)) from None


def _moved(environ: Mapping[str, str], prefix: str, copy: str) -> Dict[str, str]:
    """Returns the environment variables `environ`, with the path `copy` wherever a value has the path `prefix`.

    `prefix` is the shared environment, and `copy` is this node's copy of it. If `prefix` is a symbolic link, the path that it
    points to is replaced as well, because the activation of the environment has put both paths into variables.
    """
    target = os.path.join(os.path.dirname(prefix), os.path.basename(os.path.realpath(prefix)))
    moved = {}
    for name, value in environ.items():
        for path in (os.path.realpath(prefix), target, prefix):  # The longer one first.
            value = value.replace(path, copy)
        moved[name] = value
    return moved


class Remarks:
    """Collects the remarks of nodes about their copies of the environment, for the Dagster logs of payloads.

    A remark is a phase and a message. The remark of this node, whose name is `name`, comes first; see the variable `remark`. A
    remark of another node is added only if that node could not make a copy. The object keeps one remark for each node, and at
    most `_MOST_REMARKS` remarks.
    """

    def __init__(self, name: str) -> None:
        self._by_node = {} if remark is None else {name: remark}

    @property
    def said(self) -> List[Tuple[str, str]]:
        """The remarks collected so far, each a phase and a message."""
        return list(self._by_node.values())

    def add(self, name: str, said: Optional[Sequence[str]]) -> Optional[Tuple[str, str]]:
        """Add `said`, the remark of the node `name`, if the node could not make a copy; return the remark if it was added.

        `said` is None if nodes make no copies. The result is None if `said` was not added.
        """
        if not said or said[0] != NO_COPY or name in self._by_node or len(self._by_node) >= _MOST_REMARKS:
            return None
        self._by_node[name] = said[0], said[1]
        return self._by_node[name]
