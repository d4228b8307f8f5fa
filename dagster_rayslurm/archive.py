"""The runtime as one file, named by its content: what is cached here, and later on a cluster, is never stale."""

from __future__ import annotations

import hashlib
import io
import zipfile
from functools import lru_cache
from pathlib import Path

from . import runtime
from .runtime.record import write_atomically

PACKAGE = "rayslurm_runtime"
"""Name of the package inside the archive; not `runtime`, which a payload's own module may be called."""

_MAIN = f"import sys\nfrom {PACKAGE}.__main__ import main\nsys.exit(main(sys.argv[1:]))\n"


@lru_cache(maxsize=1)
def runtime_archive() -> tuple[str, bytes]:
    """The file name and the bytes of the runtime's zipapp; the same sources give the same bytes."""
    sources = sorted(Path(runtime.__file__).parent.glob("*.py"))
    members = {"__main__.py": _MAIN.encode()} | {f"{PACKAGE}/{path.name}": path.read_bytes() for path in sources}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(name), content)  # ZipInfo's fixed date keeps the bytes equal.
    content = buffer.getvalue()
    return f"runtime-{hashlib.sha256(content).hexdigest()[:16]}.pyz", content


def install_runtime(directory: Path) -> Path:
    """Put the runtime into a directory of this machine, unless it is there.

    Raises:
        OSError: the directory cannot be written.
    """
    name, content = runtime_archive()
    path = directory / name
    if not path.exists():
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(str(path), content)
    return path
