"""Python environments on the cluster: examines environments, builds them from recipes, and describes the cluster's machines.

The prefix of an environment is its directory. A recipe lists the commands that build an environment.
"""

import contextlib
import fcntl
import json
import os
import time

from . import base_directory, files, processes, slurm

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

# Paths of Python below the prefix of an environment; the first that exists is used.
_PYTHONS = ("bin/python", "bin/python3", "env/bin/python")
# File in a prefix that `make` made, with the commands, and the command by which they were run.
_RECIPE = "rayslurm.json"
# Script of bash that sources the first argument and then runs the command in the other arguments. The sourced file sees no
# arguments: conda's `activate` would take them for its own.
ACTIVATE = 'rayslurm=("$@"); set --; . "${rayslurm[0]}" && exec "${rayslurm[@]:1}"'
# The program that reports the versions in an environment, and the paths whose change outdates them. It imports none of the
# packages, and runs in every Python, even one that is too old.
PROBE = """\
import json, os, sys

def version(module, distribution):
    from importlib import metadata, util
    spec = util.find_spec(module)
    if spec is None or spec.origin is None:  # Not found, or only a directory with that name.
        return None
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""

if sys.path[:1] == [""]:
    del sys.path[0]  # The current directory is not part of the environment.
facts, paths = {"python": list(sys.version_info[:3])}, []
if sys.version_info >= (3, 8):
    facts.update(ray=version("ray", "ray"), pipes=version("dagster_pipes", "dagster-pipes"))
    paths = [sys.executable, os.path.realpath(sys.executable), os.path.join(sys.prefix, "pyvenv.cfg")] + sys.path
sys.stdout.write(word + json.dumps([facts, paths]))
"""
_IMPORT = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)"


def find(prefix: str) -> "tuple[str, str]":
    """Return the paths of the Python and of the `activate.sh` in an environment's directory; "" stands for a missing file."""
    paths = [os.path.join(prefix, name) for name in _PYTHONS]
    script = os.path.join(prefix, "activate.sh")
    python = next((path for path in paths if os.path.isfile(path) and os.access(path, os.X_OK)), "")
    return python, script if os.path.isfile(script) else ""


def look(prefix: str, python: str, imports: "Sequence[str]", cache: str, age: float, timeout: float) -> "dict[str, Any]":
    """Return facts about an environment, such as the paths of Python and `activate.sh`, and the versions of Python and Ray.

    Args:
        prefix: the directory of the environment; "" to look at the interpreter `python` instead.
        python: the path of an interpreter; not used if there is a `prefix`.
        imports: names of modules that Python tries to import.
        cache: the path of a file in which the facts are kept.
        age: seconds for which the facts in `cache` are used again. The facts are not used again if Python or a directory on the
            import path has changed.
        timeout: seconds for each start of Python, including the time of `activate.sh`.

    Returns a dict with these keys; if the environment cannot be used, some of the other keys are missing:
        python, activate: the paths; `activate` is "" if there is no `activate.sh`.
        container: the content of container.json; None if the environment is not in a container.
        facts: a dict with the facts that the program `PROBE` reports, and with the key `unimportable`: the reason why one of
            `imports` cannot be imported, or "" if all can. For a container that Pyxis (a plugin of srun) starts, `facts` is None,
            because only a job can look into the image.
        cached: True if the facts come from `cache`.
        problem: only if the environment cannot be used: the key of a message in `environments.check`.
        code, error: only if `activate.sh` or Python fails: the exit code, and the end of the error output.
    """
    activate, container, runner = "", None, []  # type: str, dict[str, Any] | None, list[str]
    if prefix:
        container, runner = _container(prefix), _recipe(prefix).get("runner", [])
        python, activate = find(prefix)
        links = [path for path in (os.path.join(prefix, name) for name in _PYTHONS) if os.path.lexists(path)]
        if runner and links:
            python = links[0]  # The link may lead to a Python that this machine lacks.
        if not os.path.isdir(prefix):
            return {"problem": "file" if os.path.isfile(prefix) else "absent"}
        if not python and not activate and container is None:
            return {"problem": "broken" if any(not os.path.exists(each) for each in links) else "empty"}
    python = python or "python3"
    found = {"python": python, "activate": activate, "container": container}  # type: dict[str, Any]
    if container is not None and "srun" in container:
        return dict(found, python=container["python"], **_look_at_pyxis(container, timeout))
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        with open(cache, encoding="utf-8") as file:
            known = json.load(file)
        if os.stat(cache).st_mtime > time.time() - age and known["states"] == _states(known["paths"]):
            return dict(found, facts=known["facts"], cached=True)
    probed = _probe([*runner], python, activate, imports, timeout)
    if "problem" in probed:
        return dict(found, **probed)
    facts, paths = probed["facts"], probed["paths"]
    if container is not None:  # The image may be a directory.
        paths = [container["path"]] + [container["path"] + path for path in paths]
    paths += [os.path.join(prefix or python, name) for name in ("activate.sh", *_PYTHONS)]
    files.make_dir(os.path.dirname(cache))
    files.write(cache, json.dumps({"facts": facts, "paths": paths, "states": _states(paths)}).encode(), 0o600)
    return dict(found, facts=facts, cached=False)


def _probe(start: "list[str]", python: str, activate: str, imports: "Sequence[str]", timeout: float) -> "dict[str, Any]":
    """Run the program `PROBE` with the Python `python`, and then try to import modules.

    Args:
        start: the words before Python on the command line, such as srun with options; [] to start Python on this machine.
        python: the path or name of Python.
        activate: the path of a script to source before Python starts; "" if there is none.
        imports: names of the modules to import.
        timeout: seconds for `PROBE`, and again for the imports.

    If `PROBE` succeeds, returns a dict with these keys:
        facts: the facts that `PROBE` reports, and the key `unimportable`: the reason why an import failed, or "" if none failed.
        paths: the paths of files and directories. The facts are valid until one of these changes.

    Otherwise, returns a dict with these keys:
        problem: "activate" if the script `activate` fails, "python" if `PROBE` fails, and "late" if `PROBE` takes too long.
        code, error: the exit code and the end of the error output; missing if `PROBE` takes too long.
    """
    environ = _environ(start)
    word = os.urandom(16).hex()  # The word separates the answer from what start-up scripts print.
    if activate:
        start = [*start, "bash", "-c", ACTIVATE, "rayslurm", activate, "sh", "-c", 'echo "$0"; exec "$@"', word]

    def run(program: str, *words: str) -> "tuple[int | None, bytes, bytes]":
        return processes.run([*start, python, "-c", program, *words], b"", timeout, environ, "/")

    code, out, error = run("word = %r\n%s" % (word, PROBE))
    said = out.decode("utf-8", "replace").split(word)
    if code is None:
        return {"problem": "late"}
    if not said[-1].startswith("["):
        started = not activate or len(said) > 1
        return {"problem": "python" if started else "activate", "code": code, "error": error.decode("utf-8", "replace")[-1000:]}
    facts, paths = json.loads(said[-1])
    facts["unimportable"] = ""
    if imports:
        code, _, error = run(_IMPORT, *imports)
        lines = error.decode("utf-8", "replace").strip().splitlines()
        how = "takes over {:g} s".format(timeout) if code is None else "ends with exit code {}".format(code)
        facts["unimportable"] = "" if code == 0 else lines[-1] if code == 1 and lines else "the import " + how
    return {"facts": facts, "paths": paths}


def _container(prefix: str) -> "dict[str, Any] | None":
    """Return the content of `container.json`, which describes the container of a prefix; None without a valid file."""
    with contextlib.suppress(OSError, ValueError), open(os.path.join(prefix, "container.json"), encoding="utf-8") as file:
        return dict(json.load(file))
    return None


def _look_at_pyxis(container: "dict[str, Any]", timeout: float) -> "dict[str, Any]":
    """Check that srun has the options of Pyxis, srun's plugin for containers, and that the image exists if the image is a path.

    `container` is the content of container.json. srun may take `timeout` seconds. Returns a dict with a `problem` if a check
    fails. Otherwise, the dict has `facts`, which are None because only a job can look into the image, and `cached`, which is
    False.
    """
    if container["path"].startswith("/") and not os.path.exists(container["path"]):
        return {"problem": "image"}
    _, out, error = slurm.run(["srun", "--help"], b"", timeout, ())
    return {"facts": None, "cached": False} if b"--container-image" in out + error else {"problem": "pyxis"}


def _states(paths: "list[str]") -> "list[list[int] | None]":
    """Return stat fields of each path, which differ after a change of the file or directory; None for a missing path."""
    states = []  # type: list[list[int] | None]
    for path in paths:
        try:
            status = os.stat(path)
            states.append([status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns])
        except (OSError, ValueError):
            states.append(None)
    return states


# -- environments that are sent ------------------------------------------------------------------------------------------

PREFIX = "{prefix}"  # Stands in the commands of `make` for the path of the new prefix.
# Shell script that prints the platform, and runs the program in the first argument, `_PYTHON`, by each Python that the other
# arguments name.
_PLATFORM = """\
echo "machine $(uname -m)"
echo "libc $(getconf GNU_LIBC_VERSION 2>/dev/null)"
echo "cpu $(sed -n 's/^\\(flags\\|Features\\)[[:space:]]*: *//p' /proc/cpuinfo | head -n 1)"
program=$1
shift
for name in "$@"; do
    case $name in "~/"*) name=$HOME/${name#??};; esac
    path=$(command -v "$name") && "$path" -I -c "$program"
done
exit 0
"""
_PYTHON = """\
import json, platform, sys
base = getattr(sys, "_base_executable", None) or sys.executable
print("python " + json.dumps([base, list(sys.version_info[:3]), sys.implementation.name, platform.machine()]))
"""
# Variables with which a user's login chooses where jobs run.
_LOGIN_CHOICES = ("SBATCH_PARTITION", "SBATCH_ACCOUNT", "SBATCH_QOS", "SBATCH_RESERVATION", "SBATCH_CONSTRAINT")


def _environ(runner: "Sequence[str]") -> "dict[str, str]":
    """Return the environment variables for a command that begins with the words `runner`, such as srun and its options.

    If `runner` is empty, the command runs on this machine. Otherwise, the result includes the `SBATCH_*` variables by which the
    user's login chooses where jobs run, such as SBATCH_PARTITION.
    """
    return slurm.environment(_LOGIN_CHOICES) if runner else slurm.without_options(slurm.login_environment())


def platform(python: str, runner: "Sequence[str]", timeout: float) -> "dict[str, Any]":
    """Return a dict that describes the edge node or a compute node; after a failure, the dict has only the key `problem`.

    Args:
        python: the path or name of the Python to describe; "" for each Python with a usual name on the PATH.
        runner: the beginning of a command, such as srun and options, that runs the following words on the machine; an empty list
            for this machine.
        timeout: seconds for the answer.

    The dict has these keys:
        machine: the architecture, such as "x86_64".
        cpu: the CPU's flags as one text.
        glibc: the version of glibc; "" for another C library.
        pythons: a list for each Python that was found: path, version, implementation and architecture.

    If there is no answer in time, or a command fails, `problem` is a text such as the last line of the error output.
    """
    names = [python] if python else ["python3"] + ["python3.%d" % minor for minor in range(8, 20)]
    words = [*runner, "sh", "-c", _PLATFORM, "sh", _PYTHON, *names]
    code, out, error = processes.run(words, b"", timeout, _environ(runner), "/")
    lines = [line.partition(" ")[::2] for line in out.decode("utf-8", "replace").splitlines()]
    found = dict(lines)
    if code != 0 or "machine" not in found:
        said = error.decode("utf-8", "replace").strip().splitlines()
        return {"problem": said[-1] if said else "no answer within {:g} s".format(timeout)}
    pythons = {text: json.loads(text) for key, text in lines if key == "python"}
    name, _, version = found.get("libc", "").partition(" ")
    glibc = version if name == "glibc" else ""
    return {"machine": found["machine"], "glibc": glibc, "cpu": found.get("cpu", ""), "pythons": list(pythons.values())}


def make(directory: str, key: str, recipe: "Mapping[str, Any]", timeout: float) -> str:
    """Build the environment `directory`/`key` unless it exists; returns "", or the error message of a failed command.

    A command fails if its exit code is not 0, or if it takes over `timeout` seconds. `recipe["commands"]` are lists of words, in
    which the text `PREFIX` stands for the path of the environment. `recipe["runner"]` are the words to put before each command so
    that it runs on a compute node, such as ["srun", …]; [] to run it on this machine.

    An environment cannot be renamed, because the files of the environment contain the path. Therefore each call builds in a new
    directory. Once the environment is complete, the call makes the symbolic link `key` to this directory. A lock makes other
    processes wait meanwhile. On a file system without locks, several processes may build the environment at the same time; the
    first complete environment is used.
    """
    base_directory.make_private(directory)
    link = os.path.join(directory, key)
    runner = recipe["runner"]
    environ = _environ(runner)
    environ = {name: environ[name] for name in environ if not name.startswith(("UV_", "PIP_", "PYTHON", "VIRTUAL_ENV"))}
    lock = os.open(os.path.join(directory, ".lock-" + key[0]), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    prefix = link + "-" + os.urandom(4).hex()
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        if os.path.isdir(link):
            return ""
        files.remove(link)  # The link leads nowhere if the sweep was interrupted.
        os.mkdir(prefix, 0o700)
        files.write(os.path.join(prefix, _RECIPE), json.dumps(recipe).encode(), 0o600)
        # In the machine's /tmp, uv would leave lock files to which every user of the machine may write.
        temporary = os.path.join(prefix, ".tmp")
        os.mkdir(temporary, 0o700)
        environ["TMPDIR"] = temporary
        for command in recipe["commands"]:
            words = [*runner, *(word.replace(PREFIX, prefix) for word in command)]
            code, out, error = processes.run(words, b"", timeout, environ, prefix)
            if code != 0:
                said = (error or out).decode("utf-8", "replace")[-1000:].strip()
                late = "took over {:g} s".format(timeout) if code is None else "ended with exit code {}".format(code)
                return said or "{} {}".format(os.path.basename(words[0]), late)
        files.remove(temporary)
        if recipe.get("node_local"):  # The nodes look whether their disks have room for the prefix.
            files.write(os.path.join(prefix, _RECIPE), json.dumps(dict(recipe, bytes=_size(prefix))).encode(), 0o600)
        with contextlib.suppress(FileExistsError):
            os.symlink(os.path.basename(prefix), link)
            prefix = ""
        return ""
    finally:
        os.close(lock)
        if prefix:
            files.remove(prefix)


def _recipe(prefix: str) -> "dict[str, Any]":
    """Return the recipe by which `make` has built the environment in the directory `prefix`; {} if `make` has not built it."""
    with contextlib.suppress(OSError, ValueError), open(os.path.join(prefix, _RECIPE), encoding="utf-8") as file:
        recipe = json.load(file)
        return recipe if isinstance(recipe, dict) else {}
    return {}


def made(base: str) -> "list[dict[str, Any]]":
    """Return a dict for each environment that `make` has built below the base directory `base`.

    The dict has the `path`, the `title` (one line about the environment, or ""), the time of the last use as `used` (in seconds
    since the epoch), and the disk space as `bytes`.
    """
    found = []
    directory = os.path.join(base, "prefixes")
    for name in sorted(os.listdir(directory) if os.path.isdir(directory) else []):
        path = os.path.join(directory, name)
        if not os.path.islink(path):
            continue
        with contextlib.suppress(OSError):
            title, used = _recipe(path).get("title", ""), os.stat(path).st_mtime
            found.append({"path": path, "title": title, "used": used, "bytes": _size(os.path.realpath(path))})
    return found


def _size(path: str) -> int:
    """Return the disk space of all files below a directory, in bytes."""
    found = {}
    for parent, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                status = os.lstat(os.path.join(parent, name))
                found[status.st_ino] = status.st_blocks * 512
    return sum(found.values())
