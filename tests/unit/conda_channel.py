"""A conda channel of files: packages written with Python alone, and lock files of pixi that name them.

The formats are those of https://docs.conda.io/projects/conda-build/en/stable/resources/package-spec.html and of pixi's locks.
"""

import bz2
import hashlib
import io
import json
import os
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

SUBDIR = {"x86_64": "linux-64"}.get(os.uname().machine, f"linux-{os.uname().machine}")
PLACEHOLDER = "/opt/" + "placehold_" * 24
VERSION = f"{sys.version_info[0]}.{sys.version_info[1]}"
_UNUSED = {
    "test",
    "tests",
    "idlelib",
    "tkinter",
    "ensurepip",
    "lib2to3",
    "turtledemo",
    "site-packages",
    "__pycache__",
    "pydoc_data",
}


@dataclass(frozen=True)
class Package:
    """A package of the channel, as a lock file names it."""

    url: str
    record: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.record["name"])


def package(
    channel: Path,
    name: str,
    version: str = "1.0",
    files: Mapping[str, bytes | str | Path] = {},
    *,
    links: Mapping[str, str] = {},
    executable: Sequence[str] = (),
    placeholders: Mapping[str, str] = {},
    placeholder: str = PLACEHOLDER,
    depends: Sequence[str] = (),
    noarch: str = "",
    entry_points: Sequence[str] = (),
    old: bool = False,
    **more: Any,
) -> Package:
    """Write a package; `placeholders` says for each file with the prefix whether it is text or binary.

    It is a `.conda` archive, or in the old format a `.tar.bz2`.
    """
    subdir, build = "noarch" if noarch else SUBDIR, "0"
    index = {
        "name": name,
        "version": version,
        "build": build,
        "build_number": 0,
        "subdir": subdir,
        "depends": list(depends),
        **more,
    }
    if noarch:
        index["noarch"] = noarch
    contents, paths = {}, []
    for path, given in files.items():
        content = given.read_bytes() if isinstance(given, Path) else given.encode() if isinstance(given, str) else given
        contents[path] = content
        entry = {"_path": path, "path_type": "hardlink", "sha256": _digest(content), "size_in_bytes": len(content)}
        if path in placeholders:
            entry.update(prefix_placeholder=placeholder, file_mode=placeholders[path])
        paths.append(entry)
    paths += [{"_path": path, "path_type": "softlink", "sha256": _digest(b""), "size_in_bytes": 0} for path in links]
    about = {"info/index.json": index, "info/paths.json": {"paths_version": 1, "paths": paths}, "info/about.json": {}}
    if noarch == "python":
        link = {"noarch": {"type": "python", "entry_points": list(entry_points)}, "package_metadata_version": 1}
        about["info/link.json"] = link
    info = {path: json.dumps(text).encode() for path, text in about.items()}
    info["info/files"] = "\n".join(str(each["_path"]) for each in paths).encode()
    stem = f"{name}-{version}-{build}"
    archive = channel / subdir / (stem + (".tar.bz2" if old else ".conda"))
    archive.parent.mkdir(parents=True, exist_ok=True)
    if old:
        archive.write_bytes(bz2.compress(_tar({**contents, **info}, links, executable)))
    else:
        compress = pytest.importorskip("zstandard").ZstdCompressor(level=1).compress
        with zipfile.ZipFile(archive, "w") as parts:
            parts.writestr("metadata.json", '{"conda_pkg_format_version": 2}')
            parts.writestr(f"pkg-{stem}.tar.zst", compress(_tar(contents, links, executable)))
            parts.writestr(f"info-{stem}.tar.zst", compress(_tar(info)))
    return Package(f"file://{archive}", {**index, "sha256": _digest(archive.read_bytes())})


def interpreter(channel: Path, **more: Any) -> Package:
    """A package with the CPython that runs the tests, which it makes relocatable."""
    executable = Path(os.path.realpath(sys._base_executable))  # type: ignore[attr-defined]
    library, shared = Path(sysconfig.get_path("stdlib")), Path(str(sysconfig.get_config_var("LIBDIR")))
    # A run path of the build, as that of pyenv, becomes one relative to the executable, which is what conda-build does.
    old, new = f"{shared}\0".encode(), b"$ORIGIN/../lib\0"
    content = executable.read_bytes().replace(old, new.ljust(len(old), b"\0"))
    files: dict[str, bytes | str | Path] = {f"bin/python{VERSION}": content}
    for path in sorted(library.rglob("*")):
        relative = path.relative_to(library)
        wanted = (
            path.suffix in (".py", ".so") and not _UNUSED & set(relative.parts) and not relative.parts[0].startswith("config-")
        )
        if wanted and path.is_file():
            files[f"lib/python{VERSION}/{relative}"] = path
    name = str(sysconfig.get_config_var("INSTSONAME"))
    if name.startswith("libpython") and ".so" in name and (shared / name).exists():
        files[f"lib/{name}"] = shared / name
    links = {"bin/python": f"python{VERSION}", "bin/python3": f"python{VERSION}"}
    version = ".".join(map(str, sys.version_info[:3]))
    return package(channel, "python", version, files, links=links, executable=[f"bin/python{VERSION}"], **more)


def lock_text(packages: Sequence[Package], *, environment: str = "default", subdir: str = SUBDIR, version: int = 6) -> str:
    """A lock file of pixi with an environment; it is JSON, and so YAML."""
    names, entries = [], []
    for each in packages:
        kind = "conda" if each.record.get("build") else "pypi"
        names.append({kind: each.url})
        if version == 5:
            place = "url" if "://" in each.url else "path"
            entries.append({"kind": kind, place: each.url, **each.record})
        else:
            entries.append({kind: each.url, **each.record})
    found = {"channels": [{"url": "https://conda.example/study/"}], "indexes": ["https://pypi.example/simple"]}
    lock: dict[str, Any] = {"version": version, "environments": {environment: {**found, "packages": {subdir: names}}}}
    if version >= 7:
        lock["platforms"] = [{"name": subdir}]
    return json.dumps({**lock, "packages": entries}, indent=1)


def pypi(path: str, name: str, version: str = "1.0", **more: str) -> Package:
    """A PyPI package, by the path of its file or directory; without `sha256` the lock has no hash."""
    return Package(path, {"name": name, "version": version, **more})


def _tar(contents: Mapping[str, bytes], links: Mapping[str, str] = {}, executable: Sequence[str] = ()) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path, content in contents.items():
            info = tarfile.TarInfo(path)
            info.size, info.mode, info.mtime = len(content), 0o755 if path in executable else 0o644, 1700000000
            tar.addfile(info, io.BytesIO(content))
        for path, target in links.items():
            info = tarfile.TarInfo(path)
            info.type, info.linkname = tarfile.SYMTYPE, target
            tar.addfile(info)
    return buffer.getvalue()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
