"""Containers: a prefix on the cluster whose `bin/python` is a script that starts the Python of an image inside a container.

A prefix is the directory of an installed environment. The check before submission, the identity of sessions and the job script
treat a prefix with a container like any other prefix. Ray, the payloads and the runtime of each node run inside the container;
the Slurm step that starts the runtime is outside. Pyxis is not a program of its own, but adds options to `srun`.

The command lines for Charliecloud follow ch-run(1), and were tested with Charliecloud 0.31 and 0.38. The command lines for Podman
follow podman-run(1), and were tested with Podman 4.3. The command lines for Apptainer follow "apptainer exec" in the user
documentation of Apptainer 1.3, and were not tested. The options for Pyxis follow the usage page in the wiki of Pyxis 0.20, and
were not tested.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
import shlex
from collections.abc import Callable, Mapping, Sequence

from ..edge.environment import PREFIX
from ..ssh.base import Connection, check_no_variable, expand_home
from . import ContainerEnvironment
from .recipe import Piece, Recipe, activate_script, local_piece

_Mount = tuple[str, ...]  # The source and the target of a mount, and its options if there are any.

PROGRAMS = {"apptainer": "apptainer", "charliecloud": "ch-run", "podman": "podman", "pyxis": "srun"}

REFUSED = 78  # Exit code of the script after an error message of its own (EX_CONFIG in sysexits(3)).
_SHARED = ("/tmp", "/dev", "/proc", "/sys")  # Directories of the node that every container sees.

# ---- The scripts in the prefix

# Slurm's programs are not in the image. A loop outside runs them for programs of the same names inside, which write to a FIFO in
# the run directory. The loop reads until nobody has the FIFO open for writing, that is until the runtime of this node has ended.
# It is no child of the runtime, which ends all its children, and may then want scancel.
_SERVE = """\
trap '' HUP INT TERM
while read -r call program; do
    (
        set --
        while IFS= read -r word; do set -- "$@" "$word"; done <"$call/words"
        "$program" "$@" </dev/null >"$call/out" 2>"$call/err"
        echo "$?" 1<>"$call/code"
    ) &
done
"""

_OUTSIDE = """\
calls=
if [ -n "${SLURM_NODEID:-}" ] && [ -w . ] && calls=$(mktemp -d "$PWD/.slurm.XXXXXX") && mkfifo -m 600 "$calls/calls"; then
    exec 9<>"$calls/calls"
    (sh -c @serve@ rayslurm-slurm "$calls" <"$calls/calls" >/dev/null 2>&1 9>&- &)
else
    calls=  # Not every file system has FIFOs.
fi
"""

_PROGRAM = """\
#!/bin/sh
# Runs the program of Slurm with this name outside the container; see environments/container.py.
call=$(mktemp -d "$SLURM_CALLS_OUTSIDE/call.XXXXXX") || exit
trap 'rm -rf "$call"' EXIT
for word; do printf '%s\\n' "$word"; done >"$call/words"
mkfifo -m 600 "$call/code" && exec 8<>"$call/code" && echo "$call ${0##*/}" >"$SLURM_CALLS_OUTSIDE/calls" || exit
read -r code <&8
cat "$call/out"
cat "$call/err" >&2
exit "$code"
"""

# Runs inside: $0 is the directory of the programs above, $1 that of the calls or "".
_INSIDE = """\
export PYTHONNOUSERSITE=1
[ -z "$1" ] || export SLURM_CALLS_OUTSIDE="$1" PATH="$PATH:$0"
shift
command -v "$1" >/dev/null || { echo "the image has no $1; name its Python: ContainerEnvironment(python=...)" >&2; exit 78; }
exec "$@"
"""

_HEAD = """\
#!/bin/sh
# Starts the Python of a container image inside a container; see environments/container.py.
fail() { printf '%s\\n' "$1" >&2; exit 78; }
here=$(uname -n)
command -v @program@ >/dev/null ||
    fail "there is no program @program@ on $here; load its module by ContainerEnvironment(commands=...), or take another runtime"
image=@image@
[ -e "$image" ] || fail "there is no image $image on $here; name one that the edge node and the compute nodes see"
for place in @sources@; do
    [ -e "$place" ] || fail "there is no $place on $here to mount into the container"
done
# Those of the login are for programs outside.
unset LD_PRELOAD PYTHONHOME PYTHONPATH
export RAYSLURM_PARENT="$PPID"
"""

_CHARLIECLOUD = """\
set -- "$image" -- sh -c @inside@ @prefix@/slurm "$calls" @python@ "$@"
: "${USER:=$(id -un)}"
export USER
home=
if [ "$HOME" = "/home/$USER" ]; then set -- --home "$@"; else home=$HOME && set -- --bind="$HOME" "$@"; fi
if [ -d "$image" ]; then
    fake=
    for place in @targets@ "$home"; do
        [ -e "$image$place" ] && continue
        case $(ch-run --help 2>&1) in *--write-fake*) fake=--write-fake ;; *)
            fail "the image $image has no directory $place to mount at; make it: mkdir -p $image$place" ;;
        esac
    done
    [ -z "$fake" ] || set -- "$fake" "$@"
    # Variables of the image, if it comes from a registry.
    [ ! -e "$image/ch/environment" ] || set -- --set-env "$@"
fi
# The container's /tmp is the node's TMPDIR, where ch-run writes files itself.
for place in "${TMPDIR:-/tmp}" /tmp /var/tmp; do
    export TMPDIR="$place"
    head -c 300000 /dev/zero 2>/dev/null >"$place/ch-run.$$" && rm "$place/ch-run.$$" && break
    rm -f "$place/ch-run.$$"
done
set -- --set-env=PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$@"
exec ch-run --cd="$PWD" --unset-env='LD_*' --unset-env=TMPDIR @options@ "$@"
"""

_APPTAINER = """\
set -- "$image" sh -c @inside@ @prefix@/slurm "$calls" @python@ "$@"
case ${TMPDIR:-/tmp} in /tmp | /tmp/*) ;; *) set -- --bind "$TMPDIR" "$@" ;; esac
[ ! -e /dev/nvidiactl ] || set -- --nv "$@"
[ ! -e /dev/kfd ] || set -- --rocm "$@"
exec apptainer --silent exec --pwd "$PWD" @options@ "$@"
"""

# Processes of the container belong to the job as others do: no namespace of their own for process ids, network and memory.
_PODMAN = """\
unset LD_LIBRARY_PATH
set -- "$image" sh -c @inside@ @prefix@/slurm "$calls" @python@ "$@"
if [ -d "$image" ]; then
    set -- --rootfs "$@"
    if [ -e "${image%/*}/environment" ]; then  # Variables of the image, if it comes from a registry.
        set -- --env-file="${image%/*}/environment" "$@"
    else
        set -- --env=PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$@"
    fi
else
    shift
    set -- "docker-archive:$image" "$@"
fi
case ${TMPDIR:-/tmp} in /tmp | /tmp/*) ;; *) set -- --volume="$TMPDIR:$TMPDIR" "$@" ;; esac
if [ -e /dev/nvidiactl ]; then set -- --device=nvidia.com/gpu=all "$@"; fi
exec podman --log-level=error run --rm --userns=keep-id --pid=host --ipc=host --network=host --uts=host --cgroupns=host \\
    --pids-limit=-1 --security-opt=label=disable --security-opt=seccomp=unconfined --env-host --env=HOME="$HOME" \\
    --workdir="$PWD" --volume="$HOME:$HOME" --volume=/tmp:/tmp @options@ "$@"
"""

_SCRIPTS = {"apptainer": _APPTAINER, "charliecloud": _CHARLIECLOUD, "podman": _PODMAN}
_BIND = {"apptainer": "--bind={}", "charliecloud": "--bind={}", "podman": "--volume={}", "pyxis": "{}"}

# Writes files: pairs of path and content.
_WRITE = 'while [ "$#" -gt 1 ]; do mkdir -p "${1%/*}" && printf %s "$2" >"$1" && chmod 700 "$1" || exit; shift 2; done'

# ---- Images that are fetched, or sent

_ROOT = 'mkdir "$2/image" && cd "$2/image" && tar -x --no-same-owner --exclude="dev/*" --exclude="./dev/*" -f "$1" && '
_ROOT += '{ [ -d usr ] || [ -d bin ]; } || { echo "$1 has neither usr nor bin; write it with docker export" >&2; exit 1; }'
_LINK = 'ln -s "$1" "$2/image"'
_FETCH = {
    "apptainer": 'apptainer --silent pull "$2/image" "$1"',
    "charliecloud": 'export CH_IMAGE_STORAGE="$2/storage" && ch-image pull "${1#docker://}" && '
    'ch-convert -i ch-image -o dir "${1#docker://}" "$2/image" && rm -rf "$2/storage"',
    "podman": 'id=$(podman create "$1" true) && mkdir "$2/image" && podman export "$id" >"$2/image.tar" && '
    'tar -x --no-same-owner --exclude="dev/*" -f "$2/image.tar" -C "$2/image" && rm "$2/image.tar" && '
    """podman inspect --format '{{range .Config.Env}}{{println .}}{{end}}' "$id" | sed '/^$/d' >"$2/environment"; """
    'code=$?; podman rm "$id" >/dev/null; exit "$code"',
}
_MADE = 'for place in {targets} "$HOME"; do mkdir -p "$2/image$place" || exit; done'


def send_container(connection: Connection, environment: ContainerEnvironment, base: str, ensure: Callable[[Recipe], str]) -> str:
    """Install a prefix whose Python runs inside a container of the image; returns the path of the prefix on the cluster.

    `base` is the base directory on the cluster. The function calls `ensure` with each recipe that it needs. `ensure` must build
    the prefix of this recipe if the prefix is missing, and return the path of the prefix. Raises `ValueError` if the image or a
    mount cannot be used; the error message names the remedy.
    """
    check_no_variable(environment.image, "environment: image")
    mounts = _mounts(environment, base, lambda path: expand_home(connection, path))
    recipe = _image_recipe(environment, mounts)
    image = expand_home(connection, environment.image) if recipe is None else posixpath.join(ensure(recipe), "image")
    return ensure(container_recipe(environment, image, mounts))


def container_recipe(environment: ContainerEnvironment, image: str, mounts: Sequence[_Mount]) -> Recipe:
    """Return the recipe of a prefix with the scripts that start a container of an image.

    `image` is a path on the cluster or, for Pyxis only, a reference to an image in a registry.
    """
    runtime = environment.runtime
    about: dict[str, object] = {"image": environment.image, "path": image, "program": PROGRAMS[runtime]}
    words = [_BIND[runtime].format(":".join(each)) for each in mounts]
    files = {f"slurm/{name}": _PROGRAM for name in ("sacct", "scancel", "scontrol", "sinfo", "squeue")}
    if runtime == "pyxis":
        about["python"] = environment.python or "python3"
        about["srun"] = [
            f"--container-image={image.removeprefix('docker://')}",
            f"--container-mounts={','.join([*words, '/tmp:/tmp'])}",
            "--container-mount-home",
            "--no-container-remap-root",
            *environment.options,
        ]
        files = {}
    else:
        values = {
            "image": [image],
            "inside": [_INSIDE],
            "options": [*words, *environment.options],
            "prefix": [PREFIX],
            "program": [PROGRAMS[runtime]],
            "python": [environment.python or "python3"],
            "serve": [_SERVE],
            "sources": [each[0] for each in mounts],
            "targets": [each[1] for each in mounts],
        }
        script = _HEAD + _OUTSIDE + _SCRIPTS[runtime]
        files["bin/python"] = re.sub("@([a-z]+)@", lambda match: shlex.join(values[match[1]]), script)
    if environment.commands:
        files["activate.sh"] = activate_script(environment.commands)
    files["container.json"] = json.dumps(about)
    return Recipe([_write(files)], lambda: None)


def _mounts(environment: ContainerEnvironment, base: str, expand: Callable[[str], str]) -> list[_Mount]:
    """Return the mounts that the container needs: a mount of the base directory `base`, and the field `mounts` of `environment`.

    A mount is left out if the container sees its files at the same path anyway. `expand` replaces "~" in a path. Raises
    `ValueError` if a mount is not SOURCE, SOURCE:TARGET or SOURCE:TARGET:OPTIONS with absolute paths, or if it has OPTIONS
    although the container runtime is Charliecloud.
    """
    mounts: list[_Mount] = []
    for each in [base, *environment.mounts]:
        parts = [expand(part) if number < 2 else part for number, part in enumerate(each.split(":"))]
        if len(parts) > 3 or not all(part.startswith("/") for part in parts[:2]):
            raise ValueError(f"mounts: {each!r} is not SOURCE, SOURCE:TARGET or SOURCE:TARGET:OPTIONS with absolute paths")
        if len(parts) == 3 and environment.runtime == "charliecloud":
            raise ValueError(f"mounts: Charliecloud has no options for mounts; write {':'.join(parts[:2])!r}")
        mounts.append((*parts, parts[0]) if len(parts) == 1 else tuple(parts))
    anyway = [expand("~"), *_SHARED]
    roots = [f"{path.rstrip('/')}/" for path in (*anyway, *(each[0] for each in mounts if each[:1] == each[1:]))]

    def is_needed(mount: _Mount) -> bool:
        """Return False if the container sees the files of `mount` at the same path without the mount.

        The result is True for a mount with options.
        """
        path = mount[0]
        return mount[:1] != mount[1:] or not (path in anyway or any(path.startswith(root) for root in roots))

    return [mount for mount in dict.fromkeys(mounts) if is_needed(mount)]


def _image_recipe(environment: ContainerEnvironment, mounts: Sequence[_Mount]) -> Recipe | None:
    """Return the recipe that puts an image into a prefix; None if the image is on the cluster, or if Pyxis fetches the image.

    In an unpacked image for Charliecloud, the recipe also makes a directory for the target of each of `mounts`. Raises
    `ValueError` if an image on this machine cannot be read.
    """
    image, runtime = environment.image, environment.runtime
    if image.startswith(("/", "~/")) or (runtime == "pyxis" and not image.startswith("./")):
        return None
    made = _MADE.format(targets=shlex.join([*(each[1] for each in mounts), "/tmp"])) if runtime == "charliecloud" else "true"
    if image.startswith("./"):
        path = os.path.abspath(image)
        try:
            piece, inputs = local_piece(path)
            with open(path, "rb") as file:
                unpacks = runtime == "charliecloud" and file.read(4) != b"hsqs"  # The first bytes of a squashfs.
        except OSError as error:
            raise ValueError(f"the image {path} cannot be read on this machine: {error.strerror or error}") from None
        return Recipe([["sh", "-c", f"{_ROOT} && {made}" if unpacks else _LINK, "sh", piece, PREFIX]], inputs)
    before = [_write({"activate.sh": activate_script(environment.commands)})] if environment.commands else []
    activate = '[ ! -e "${words[1]}/activate.sh" ] || . "${words[1]}/activate.sh" || exit'
    script = f'words=("$@"); set --; {activate}; set -- "${{words[@]}}"; {_FETCH[runtime]} && {made}'
    return Recipe(
        [*before, ["bash", "-c", script, "bash", image if "://" in image else f"docker://{image}", PREFIX]], lambda: None
    )


def _write(files: Mapping[str, str]) -> list[str | Piece]:
    """Return the command that writes files into the prefix; `files` maps paths relative to the prefix to contents."""
    return ["sh", "-c", _WRITE, "sh", *(word for name, text in files.items() for word in (f"{PREFIX}/{name}", text))]


# ---- Errors

_EXPLAINED = (
    (
        r"namespaces?\b.*(not permitted|not allowed|denied|No space left|disabled|not enabled)|cannot clone",
        "{program} may not make user namespaces there ({said}); ask the administrators to allow them "
        "(sysctl user.max_user_namespaces), or use another runtime",
    ),
    (
        r"newuidmap|subuid|subgid",
        "{program} has no range of user ids there ({said}); ask the administrators for lines in /etc/subuid and /etc/subgid",
    ),
    (r"unknown image type|image format not recognized", "{program} cannot use an image of this kind ({said})"),
)


def explain(said: str, program: str) -> str:
    """Return a sentence with the remedy for a known error of a container program; for any other error, `said` as one line.

    `said` is the error output of the program, and `program` is the program's name.
    """
    said = re.sub(r"\x1b\[[0-9;]*m", "", said)
    line = next((" ".join(line.split()) for line in reversed(said.splitlines()) if line.strip()), "")
    for pattern, sentence in _EXPLAINED:
        if re.search(pattern, said, re.IGNORECASE | re.DOTALL):
            return sentence.format(program=program, said=line)
    return " ".join(said.split())
