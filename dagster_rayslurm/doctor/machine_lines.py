"""Report lines about one machine, the edge node or a compute node, from the facts that `edge.machine.look` collects. Pure.

In all functions, `machine` has the facts of the machine. `where` is the beginning of the names of the lines: "" for the edge
node, and "NODE: " for a compute node.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..slurm.request import SBATCH_FIELDS
from . import Line, failure, ok, size, warning

_LEAST_FREE = 100 * 2**20  # Bytes without which a run cannot even write the record.
_LITTLE_FREE = 2**30
_LEAST_SHM = 256 * 2**20  # Bytes of /dev/shm below which Ray's object store is on disk.
_FEW_FILES = 1000
_SKEW = 5.0  # Seconds by which clocks may differ.
_MAX_SKEW = 240.0  # Seconds; munge refuses messages that are 300 s old (munge.conf(5), TTL).
_LONGEST_TMPDIR = 39 - len("/rs-12345678/x/r")  # See `runtime.process.scratch`.
# Least hard limits by the letter of `ulimit`: below the first a Ray cluster fails, below the second it may fail.
_LIMITS = {
    "n": (1024, 4096, "open files"),
    "u": (512, 4096, "processes"),
    "v": (32 * 2**30, 32 * 2**30, "virtual memory"),
    "f": (2**30, 2**30, "size of a file"),
    "t": (60, 3600, "CPU seconds of a process"),
}
_PROXIES = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")


def edge_lines(facts: Mapping[str, Any], skew: float, margin: float) -> list[Line]:
    """Returns the lines about the edge node from `facts`, the result of `edge.site.survey`.

    The edge node's clock is `skew` seconds ahead of this machine's clock, with an error of at most `margin` seconds.
    """
    machine = facts["machine"]
    return [
        *_shell(facts["shell"]),
        _clock("clock", "the edge node", "this machine", skew, margin),
        *_base(machine, "", skew),
        *_variables(machine, ""),
        *_limits(machine, ""),
        *_programs(machine, ""),
    ]


def node_lines(machine: Mapping[str, Any], skew: float, margin: float, node: str) -> list[Line]:
    """Returns the lines about the compute node `node` from `machine`, the facts of the node.

    The node's clock is `skew` seconds ahead of the edge node's clock, with an error of at most `margin` seconds.
    """
    where = f"{node}: "
    lines = [_clock(f"{where}clock", node, "the edge node", skew, margin)]
    lines += _base(machine, where, skew)
    lines += _scratch(machine["directories"]["tmp"], where)
    lines += _shared_memory(machine["directories"]["shm"], where)
    lines += [*_limits(machine, where), *_variables(machine, where), *_programs(machine, where), *_name(machine, where)]
    return lines


def _shell(shell: Mapping[str, Any]) -> Iterator[Line]:
    """Yields a line about the login shell: whether its start-up files are slow or print text.

    `shell` has the facts about the login shell, the item `shell` in the result of `edge.site.survey`.
    """
    name, said = "login shell", (shell["out"] + shell["error"]).strip()
    if shell["code"] is None or shell["seconds"] > 5:
        what = f"the start-up files of {shell['path']} take {shell['seconds']:.0f} s, at each login"
        yield warning(name, what, "skip what is slow (conda, module load) there if the shell is not interactive")
    elif shell["out"]:
        what = f"{shell['path']} prints at each command: {said[:80]!r}; that is skipped here, but it breaks scp and rsync"
        yield warning(name, what, "in ~/.bashrc print only in interactive shells: `case $- in *i*) …;; esac`")
    else:
        yield ok(name, f"{shell['path']}, prints nothing, {1000 * shell['seconds']:.0f} ms")


def _clock(name: str, one: str, other: str, skew: float, margin: float) -> Line:
    """Returns a line, called `name`, that says whether the clocks of two machines agree; `one` and `other` are their names.

    The clock of `one` is `skew` seconds ahead of the clock of `other`, with an error of at most `margin` seconds.
    """
    certain = max(0.0, abs(skew) - margin)
    ahead = f"{one} is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} {other}"
    remedy = "set the clock that is wrong (chronyc tracking, timedatectl); of the cluster's, tell the site"
    if certain > _MAX_SKEW:
        return failure(name, f"{ahead}; Slurm refuses messages whose time differs by 5 minutes", remedy)
    if certain > _SKEW:
        return warning(name, ahead, remedy)
    return ok(name, f"{one} and {other} differ by less than {certain + 1:.0f} s")


def _base(machine: Mapping[str, Any], where: str, skew: float) -> Iterator[Line]:
    """Yields lines about the base directory: who can write there, the free space, the file server's clock, and the mount options.

    The clock of the examined machine is `skew` seconds ahead of a reference clock. The reference for the edge node is this
    machine's clock. The reference for a compute node is the edge node's clock. The file server's clock gets a warning only if it
    differs from both the examined machine's clock and the reference clock.
    """
    name, base = f"{where}base directory", machine["directories"]["base"]
    path, choose = base["path"], "choose another SlurmResource.remote_base, of your own and shared with the compute nodes"
    space = _space(base)
    if space is not None:
        yield failure(f"{where}disk space", f"{path}: {space}", "remove files there, or choose another remote_base")
        return
    if "error" in base:
        yield failure(name, f"{path} cannot be written: {base['error']}", choose)
        return
    if base["exists"] and not base["mine"]:
        yield failure(name, f"{path} belongs to another user, who could change what runs there", choose)
    elif base["exists"] and base["mode"] & 0o022:
        what = f"others can write to {path} (mode {base['mode']:04o}), and so change what runs there"
        yield failure(name, what, f"run there: chmod go-w {path}")
    else:
        yield ok(name, path + ("" if base["exists"] else " (not there yet, can be made)"))
    late = base.get("clock", 0.0)
    if min(abs(late), abs(late + skew)) > _SKEW:
        what = f"the clock of the file server of {path} differs by {abs(late):.0f} s"
        yield warning(f"{where}file server clock", what, "tell the site; nothing here depends on it, but make and rsync do")
    if base["noexec"]:
        what = f"the file system of {path} is mounted noexec, so no program in it can be started"
        yield warning(f"{where}noexec", what, "environments and scripts must be elsewhere, or choose another remote_base")
    if base["free"] < _LITTLE_FREE or (base["files_free"] or _FEW_FILES) < _FEW_FILES:
        yield warning(f"{where}disk space", f"{path}: {size(base['free'])} are free", "remove files there, or ask for more quota")
    elif not where:
        yield ok("disk space", f"{size(base['free'])} free of {size(base['total'])}")


def _space(base: Mapping[str, Any]) -> str | None:
    """Returns the reason why a directory with the facts `base` takes no more files; None if the directory takes more files."""
    said = base.get("error", "")
    if "space left" in said or "quota" in said.lower():
        return str(said)
    return f"only {size(base['free'])} are free" if base.get("free", _LEAST_FREE) < _LEAST_FREE else None


def _scratch(tmp: Mapping[str, Any], where: str) -> Iterator[Line]:
    """Yields a line that says whether /tmp can be used: free space and mount options.

    `tmp` is the result of `edge.machine.directory` for /tmp.
    """
    name, remedy = f"{where}/tmp", "tell the site; or have SlurmResource.site set TMPDIR to a short path on a local disk"
    if "error" in tmp or tmp["free"] < _LEAST_FREE:
        yield failure(name, tmp.get("error") or f"only {size(tmp['free'])} are free", remedy)
    elif tmp["noexec"]:
        what = "it is mounted noexec, so that Ray's runtime environments and compiled kernels cannot be loaded from it"
        yield warning(name, what, remedy)
    elif tmp["free"] < _LITTLE_FREE:
        yield warning(name, f"only {size(tmp['free'])} are free, for Ray's logs and spilled objects", remedy)
    else:
        yield ok(name, f"{size(tmp['free'])} free")


def _shared_memory(shm: Mapping[str, Any], where: str) -> Iterator[Line]:
    """Yields a line that says whether /dev/shm is large enough. `shm` is the result of `edge.machine.directory` for /dev/shm."""
    name = f"{where}/dev/shm"
    if "error" in shm or not shm["exists"]:
        what = f"it cannot be written ({shm.get('error', 'it does not exist')}); Ray keeps its objects there"
        yield failure(name, what, "tell the site: compute nodes need a tmpfs at /dev/shm")
    elif shm["free"] < _LEAST_SHM:
        what = f"only {size(shm['free'])} are free for Ray's object store, so that objects go to disk, ten times slower"
        yield warning(name, what, "lower RayLauncher.object_store_memory_gb, or ask the site for a larger /dev/shm")
    else:
        yield ok(name, f"{size(shm['free'])} free")


def _limits(machine: Mapping[str, Any], where: str) -> Iterator[Line]:
    """Yields a line that says whether the hard limits (`ulimit -H`) are large enough for Ray."""
    name = f"{where}ulimits"
    bad: list[str] = []
    poor: list[str] = []
    for letter, (least, good, what) in _LIMITS.items():
        hard = machine["limits"][letter][1]
        if hard is not None and hard < good:
            shown = size(hard) if letter in "vf" else hard
            (bad if hard < least else poor).append(f"{what} ({shown}, ulimit -{letter})")
    if bad or poor:
        text = f"few are allowed: {', '.join([*bad, *poor])}" + ("" if where else "; jobs inherit the limits of the login")
        remedy = "take the `ulimit` out of your start-up files, or ask the site (limits.conf, PropagateResourceLimits)"
        yield (failure if bad else warning)(name, text, remedy)
    else:
        files = machine["limits"]["n"][1]
        yield ok(name, f"{'unlimited' if files is None else files} open files")


def _variables(machine: Mapping[str, Any], where: str) -> Iterator[Line]:
    """Yields a warning about the user's environment variables that change how programs run; yields nothing if none is set."""
    set_there, found = machine["variables"], []
    if where:  # In a job Slurm sets variables of its own.
        set_there = {key: value for key, value in set_there.items() if "_" not in key or key.startswith(("RAY_", "LD_"))}
    for name in ("PYTHONPATH", "PYTHONHOME"):
        if name in set_there:
            found.append(f"{name}={set_there[name]} puts other packages before those of the environment")
    for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_TMPDIR"):
        if name in set_there:
            found.append(f"{name} is set; payloads get their own, but your other programs use it")
    tmpdir = machine["directories"].get("tmpdir")
    if tmpdir is not None and not tmpdir["exists"]:
        found.append(f"TMPDIR={tmpdir['path']} does not exist here")
    elif tmpdir is not None and where and len(tmpdir["path"]) > _LONGEST_TMPDIR:
        found.append(f"TMPDIR={tmpdir['path']} is too long for Ray's sockets, /tmp is used instead")
    if any(name in set_there for name in _PROXIES) and not {"no_proxy", "NO_PROXY"} & set(set_there):
        found.append("a proxy is set without no_proxy, so that connections between the nodes may go through it")
    options = [name for name in set_there if name.startswith(("SBATCH_", "SRUN_", "SQUEUE_", "SACCT_", "SCANCEL_"))]
    ignored = [name for name in options if name not in _COUNTING]
    if ignored and not where:
        found.append(f"{', '.join(ignored)} stand for options of Slurm, and are ignored here: write them into SlurmQueueConfig")
    if found:
        remedy = "remove them from your start-up files, or set what is needed in SlurmResource.site"
        yield warning(f"{where}variables", "; ".join(found), remedy)


# Variables of sbatch that are obeyed if the field of the queue is left out.
_COUNTING = tuple(f"SBATCH_{field.name.upper()}" for field in SBATCH_FIELDS if field.login_variable)


def _programs(machine: Mapping[str, Any], where: str) -> Iterator[Line]:
    """Yields lines about the Python, the container runtimes and the environment modules of a machine."""
    python = ".".join(map(str, machine["python"]))
    yield ok(f"{where}Python", f"{python}, {machine['executable']}")
    rootless = [name for name in machine["containers"] if name in ("podman", "enroot", "ch-run")]
    name = f"{where}containers"
    if rootless and not machine["user_namespaces"] and len(rootless) == len(machine["containers"]):
        what = f"{', '.join(rootless)} need user namespaces, which this user cannot make"
        yield warning(name, what, "ask the site for user namespaces (user.max_user_namespaces, /etc/subuid), or for Apptainer")
    else:
        runtimes = ", ".join(machine["containers"]) or "no runtime found"
        yield ok(name, f"{runtimes}; user namespaces: {'yes' if machine['user_namespaces'] else 'no'}")
    yield ok(f"{where}modules", "environment modules are set up" if machine["modules"] else "none found")


def _name(machine: Mapping[str, Any], where: str) -> Iterator[Line]:
    """Yields a warning if a machine's host name does not resolve to an address that other machines can reach."""
    address = machine["address"]
    if address is None or address.startswith("127.") or address == "::1":
        leads = "leads nowhere" if address is None else f"leads to {address}"
        what = f"its own name {machine['host']!r} {leads}, so that programs which announce themselves by name are not found"
        yield warning(f"{where}host name", what, "set RayLauncher.network_interface, or ask the site to mend /etc/hosts")
