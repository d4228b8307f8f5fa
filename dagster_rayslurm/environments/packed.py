"""Environments from archives of conda-pack, venv-pack, pixi-pack or pex.

The module recognizes by an archive's content which of these tools wrote the archive.
"""

from __future__ import annotations

import os
import sys
import tarfile
import zipfile

from ..edge.environment import PREFIX
from . import PackedEnvironment
from .platforms import Platform, Python
from .recipe import Recipe, local_piece

_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")  # First bytes of archives by gzip, bzip2, xz and zstd.
_HEADER = 65536
# conda-pack's script puts the new path into the files that contain the old one; venv-pack's archives need nothing.
_TAR = 'tar -x --no-same-owner -f "$1" -C "$2" && cd "$2" && { [ ! -e bin/conda-unpack ] || bin/python bin/conda-unpack; }'
_PIXI = 'exec bash "$1" --output-directory "$2"'
_PEX = 'PEX_ROOT="$2/pex" PEX_INTERPRETER=1 exec "$3" "$1" -c "$4" "$2"'
# Unpacks a PEX file, and makes a virtual environment that imports from there: Ray starts further processes of its Python.
_PEX_PROGRAM = """\
import os, site, sys, sysconfig, venv
prefix = sys.argv[1]
inside = [path for path in sys.path if os.path.realpath(path).startswith(os.path.realpath(prefix) + os.sep)]
venv.EnvBuilder(symlinks=True).create(prefix)
library = os.path.join(prefix, "lib", "python%d.%d" % sys.version_info[:2], "site-packages")
with open(os.path.join(library, "pex.pth"), "w") as file:
    file.write("\\n".join(inside) + "\\n")
"""


def packed_recipe(environment: PackedEnvironment, platform: Platform) -> Recipe:
    """Return the recipe (files to send and commands to run) that unpacks the environment's archive on the cluster.

    Raises `ValueError` if the archive is unreadable, or unfit for the platform.
    """
    path = os.path.abspath(os.path.expanduser(environment.archive))
    try:
        script, more, python = _script(path, platform)
        piece, state = local_piece(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}; name the archive of an environment") from None
    return Recipe([["sh", "-c", script, "sh", piece, PREFIX, *more]], state, platform.runner(python))


def _script(path: str, platform: Platform) -> tuple[str, list[str], Python | None]:
    """Return three values: a shell script that unpacks the archive `path`, further arguments of the script, and a Python.

    The script's first two arguments are the path of the archive and the prefix; the returned arguments, if any, follow. The
    Python is the interpreter on the cluster that runs an archive of pex; None for any other archive. Raises `ValueError` for a
    file that no known tool wrote, or if the platform has no Python for an archive of pex. Raises `OSError` if the archive cannot
    be read.
    """
    with open(path, "rb") as file:
        start = file.read(_HEADER)
    if start.startswith(b"#!") and b"pixi-pack" in start:
        return _PIXI, [], None
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if "PEX-INFO" in archive.namelist():
                if not platform.pythons:
                    raise ValueError(f"{path} is a PEX file, and {platform.place} has no Python on its PATH to start it")
                own = sys.version_info[:2]  # The file was most likely made for this one.
                python = max(platform.pythons, key=lambda each: (each.version[:2] == own, each.version))
                return _PEX, [python.path, _PEX_PROGRAM], python
    elif start.startswith(_COMPRESSED):
        return _TAR, [], None
    elif tarfile.is_tarfile(path):
        with tarfile.open(path, "r:") as tar:
            if any(each in tar.getnames() for each in ("pixi-pack.json", "./pixi-pack.json")):
                raise ValueError(f"{path} needs pixi-unpack, which no cluster has; pack it with pixi-pack --create-executable")
        return _TAR, [], None
    raise ValueError(
        f"{path} is no archive of conda-pack, venv-pack, pixi-pack --create-executable or pex; pack it with one of them"
    )
