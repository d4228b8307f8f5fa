"""Bundles: their content, their names, and their atomic installation on a cluster."""

import codecs
import contextlib
import hashlib
import io
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from dagster_rayslurm import archive
from dagster_rayslurm.edge import base_directory
from dagster_rayslurm.ssh.local import LocalConnection
from dagster_rayslurm.upload import bundle
from dagster_rayslurm.upload.bundle import Bundle, bundle_directory, bundle_files, make_bundle, scan, scan_files
from dagster_rayslurm.upload.deliver import install, place_of, runtime_place

from ..conftest import small_disk

many = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture
def tree(tmp_path: Path) -> Callable[..., Path]:
    """Makes a directory from its files: text by path; a path that ends with a slash is an empty directory."""

    def make(files: dict[str, str], name: str = "tree") -> Path:
        top = tmp_path / name
        top.mkdir(exist_ok=True)
        for path, text in files.items():
            full = top / path
            if path.endswith("/"):
                full.mkdir(parents=True)
            else:
                full.parent.mkdir(parents=True, exist_ok=True)
                full.write_text(text)
        return top

    return make


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """A base directory on the cluster, which is this machine."""
    return tmp_path / "base dir"


class Counting(LocalConnection):
    """This machine, and what it was asked to do."""

    def __init__(self) -> None:
        self.commands = 0
        self.uploads = 0

    def call(self, *arguments: Any, **named: Any) -> Any:
        self.commands += 1
        return super().call(*arguments, **named)

    def upload(self, *arguments: Any, **named: Any) -> None:
        self.uploads += 1
        super().upload(*arguments, **named)


def names(directory: Path, **arguments: Any) -> list[str]:
    return [entry.name for entry in scan(str(directory), **arguments).entries]


def content(directory: bytes) -> dict[bytes, tuple[Any, ...]]:
    """All that makes a tree: names, executable bits and bytes, and where links lead."""
    found: dict[bytes, tuple[Any, ...]] = {}
    for parent, directories, files in os.walk(directory):
        for name in [*directories, *files]:
            path = os.path.join(parent, name)
            kept = os.path.relpath(path, directory)
            if os.path.islink(path):
                found[kept] = ("link", os.path.relpath(os.path.realpath(path), os.path.realpath(directory)))
            elif os.path.isdir(path):
                found[kept] = ("dir",)
            else:
                found[kept] = ("file", bool(os.stat(path).st_mode & 0o100), Path(os.fsdecode(path)).read_bytes())
    return found


def installed(there: Path, *bundles: Bundle, connection: LocalConnection | None = None) -> list[Path]:
    install(connection or LocalConnection(), str(there), bundles)
    return [Path(place_of(str(there), each)) for each in bundles]


def installed_runtime(there: Path) -> Path:
    install(LocalConnection(), str(there), [])
    return Path(runtime_place(str(there)))


def own_leftovers(there: Path) -> list[str]:
    return [path.name for path in there.rglob(".rs-*")]


# -- any tree arrives as it is -----------------------------------------------------------------------------------------

odd_name = st.binary(min_size=1, max_size=40).filter(
    lambda name: not {b"\0", b"/"} & {bytes([byte]) for byte in name} and name not in (b".", b"..")
)
awkward = st.sampled_from(
    [
        b"-rf",
        b"--checkpoint-action=exec=sh",
        b"a b",
        b"new\nline",
        b"'",
        b'"',
        b"$HOME",
        b"\\",
        b"*",
        b"\xff\xfe",
        b"x" * 255,
        b"...",
    ]
)
name_strategy = st.one_of(awkward, odd_name)
file_strategy = st.tuples(st.binary(max_size=1100), st.booleans())
tree_strategy = st.dictionaries(
    name_strategy,
    st.recursive(file_strategy, lambda inner: st.dictionaries(name_strategy, inner, max_size=5), max_leaves=8),
    max_size=4,
)


def write_tree(directory: bytes, entries: Any) -> None:
    for name, entry in entries.items():
        path = os.path.join(directory, name)
        if isinstance(entry, dict):
            os.mkdir(path)
            write_tree(path, entry)
        else:
            with open(path, "wb") as file:
                file.write(entry[0])
            os.chmod(path, 0o755 if entry[1] else 0o666)


def left_out(entries: Any) -> bool:
    """Whether a tree of random names happens to have one that means something."""
    for name, entry in entries.items():
        text = os.fsdecode(name)
        if text in (".gitignore", ".rayignore", "pyvenv.cfg", "conda-meta", "venv") or text.endswith(".pyc"):
            return True
        if isinstance(entry, dict) and left_out(entry):
            return True
    return False


@many
@given(entries=tree_strategy, links=st.lists(st.tuples(name_strategy, st.integers(0, 99), st.integers(0, 99)), max_size=4))
def test_any_tree_is_copied_exactly(entries: Any, links: list[tuple[bytes, int, int]]) -> None:
    assume(not left_out(entries))
    with tempfile.TemporaryDirectory() as directory:
        source = os.fsencode(os.path.join(directory, "source"))
        os.mkdir(source)
        write_tree(source, entries)
        places = [source, *(os.path.join(source, name) for name, found in content(source).items() if found == ("dir",))]
        for name, where, to in links:
            targets = [os.path.join(source, found) for found in content(source)] or [source]
            path = os.path.join(places[where % len(places)], name)
            if not os.path.lexists(path):
                os.symlink(os.path.relpath(targets[to % len(targets)], os.path.dirname(path)), path)
        there = Path(directory, "base")
        made = bundle_directory(os.fsdecode(source))
        (target,) = installed(there, made)
        assert content(os.fsencode(target)) == content(source)
        # The same content anywhere has the same name, and what arrived is the same content.
        assert bundle_directory(str(target)) == made
        assert own_leftovers(there) == []


@pytest.mark.parametrize("length", [99, 100, 101, 155, 1000])
def test_long_paths(tree: Callable[..., Path], there: Path, length: int) -> None:
    path = "/".join(["directory"] * (length // 10)) + "/" + "f" * (length % 10 + 1)
    source = tree({path: "x"})
    os.symlink("/" + "t" * length, source / "link")
    (target,) = installed(there, bundle_directory(str(source)))
    assert (target / path).read_text() == "x" and os.readlink(target / "link") == "/" + "t" * length


# -- names -------------------------------------------------------------------------------------------------------------


def test_names_differ_if_content_differs(tree: Callable[..., Path]) -> None:
    source = tree({"a.py": "one", "d/b": "two", "e/": ""})
    changes: list[Callable[[], Any]] = [
        lambda: (source / "a.py").write_text("ONE"),
        lambda: (source / "a.py").chmod(0o755),
        lambda: (source / "d/b").rename(source / "d/c"),
        lambda: (source / "e").rmdir(),
        lambda: (source / "l").symlink_to("a.py"),
        lambda: (source / "l").unlink() or (source / "l").symlink_to("d"),
        lambda: (source / "f").write_text(""),
    ]
    seen = [bundle_directory(str(source)).name]
    for change in changes:
        change()
        seen.append(bundle_directory(str(source)).name)
    assert len(set(seen)) == len(seen)
    assert all(len(name) == 32 and int(name, 16) for name in seen)


def test_names_are_equal_if_content_is_equal(tree: Callable[..., Path], tmp_path: Path) -> None:
    source = tree({"a.py": "one", "d/b": "two"})
    before = bundle_directory(str(source))
    os.utime(source / "a.py", (1, 1))
    (source / "a.py").chmod(0o600)
    (source / "d").chmod(0o700)
    tree({"d/__pycache__/b.cpython-311.pyc": "z"})
    copy = shutil.copytree(source, tmp_path / "elsewhere")
    assert bundle_directory(str(source)) == before == bundle_directory(str(copy))
    first, second = io.BytesIO(), io.BytesIO()
    before.write_archive(first)
    bundle_directory(str(copy)).write_archive(second)
    assert first.getvalue() == second.getvalue()


def test_a_change_right_after_a_scan_changes_the_name(tree: Callable[..., Path]) -> None:
    source = tree({"a.py": ""})
    for number in range(200):  # As fast as it goes: many of these fall into one tick of the file system's clock.
        (source / "a.py").write_text(f"{number:03}")
        assert bundle_directory(str(source)).digests["a.py"] == hashlib.sha256(f"{number:03}".encode()).hexdigest()


def test_files_that_did_not_change_are_not_read_again(tree: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    source = tree({f"f{number}": str(number) for number in range(5)})
    read: list[str] = []
    real = bundle._content
    monkeypatch.setattr(bundle, "_content", lambda what, entry: read.append(entry.name) or real(what, entry))
    for _ in range(2):
        bundle_directory(str(source))
    assert len(read) == 10  # So young that another change might leave no trace.
    monkeypatch.setattr(bundle, "_SETTLED", -(10**12))  # Now they are old enough.
    read.clear()
    before = bundle_directory(str(source))
    assert len(read) == 5
    (source / "f3").write_text("x")
    read.clear()
    assert bundle_directory(str(source)) != before
    assert read == ["f3"]


def test_the_name_of_a_local_file(tree: Callable[..., Path], tmp_path: Path) -> None:
    source = tree({"pkg/train.py": "", "ignored.log": "", ".gitignore": "*.log"})
    (tmp_path / "shared.py").write_text("")
    (source / "shared.py").symlink_to(tmp_path / "shared.py")
    (source / "again.py").symlink_to("pkg/train.py")
    (tmp_path / "way").symlink_to(source)
    made = bundle_directory(str(tmp_path / "way"))
    assert made.name_of(str(source / "pkg/train.py")) == made.name_of(str(tmp_path / "way/pkg/train.py")) == "pkg/train.py"
    assert made.name_of(str(source / "shared.py")) == "shared.py"
    assert made.name_of(str(source / "again.py")) == "again.py"
    assert made.name_of(str(source)) == made.name_of(str(tmp_path / "way")) == ""
    assert made.name_of(str(source / "ignored.log")) is None and made.name_of(str(tmp_path)) is None
    assert bundle_files({"script/x.py": str(source / "pkg/train.py")}).name_of(str(source / "pkg/train.py")) == "script/x.py"


# -- what stays here ---------------------------------------------------------------------------------------------------

PROJECT = {
    ".gitignore": "*.log\n/build/\ndata/*.bin\n!keep.log\n# note\n\nfoo bar.txt\r\n\\#sharp\n**/deep/x\n",
    ".rayignore": "raw/\n*.tmp",
    "a.py": "",
    "b.log": "",
    "keep.log": "",
    "build/out": "",
    "src/build/kept": "",
    "src/c.tmp": "",
    "src/deep/x": "",
    "src/deep/y": "",
    "data/a.bin": "",
    "data/sub/b.bin": "",
    "raw/1": "",
    "foo bar.txt": "",
    "#sharp": "",
    "sub/.gitignore": "/own\n",
    "sub/own": "",
    "sub/other/own": "",
    "own": "",
    ".git/config": "",
    "venv/lib/x": "",
    ".venv/lib/x": "",
    "pkg/__pycache__/m.pyc": "",
    "pkg/m.py": "",
}


def test_ignored_files_are_those_that_ray_ignores(tree: Callable[..., Path], tmp_path: Path) -> None:
    packaging = pytest.importorskip("ray._private.runtime_env.packaging")
    from ray._private.ray_constants import RAY_RUNTIME_ENV_DEFAULT_EXCLUDES

    source = tree(PROJECT)
    target = tmp_path / "ray.zip"
    excludes = RAY_RUNTIME_ENV_DEFAULT_EXCLUDES.split(",")
    packaging.create_package(str(source), target, include_gitignore=True, excludes=excludes)
    listed = subprocess.run([sys.executable, "-m", "zipfile", "-l", str(target)], capture_output=True, text=True, check=True)
    rays = {line.rsplit(None, 3)[0] for line in listed.stdout.splitlines()[1:]}
    ours = {entry.name for entry in scan(str(source)).entries if entry.kind == "file"}
    assert ours == {name for name in rays if not name.endswith("/")} and len(ours) > 8


def test_caches_and_environments_are_left_out(tree: Callable[..., Path]) -> None:
    source = tree(
        {
            "a.py": "",
            "a.pyc": "",
            "my-env/pyvenv.cfg": "",
            "my-env/bin/python": "",
            "conda/conda-meta/history": "",
            "conda/lib/x": "",
            "web/node_modules/x/y": "",
            "web/.mypy_cache/x": "",
            "nb/.ipynb_checkpoints/x": "",
            ".dagster_home/storage/x": "",
        }
    )
    (source / "linked-env").symlink_to(sys.prefix)
    assert names(source) == ["a.py", "nb", "web"]


def test_deeper_ignore_files_decide(tree: Callable[..., Path]) -> None:
    source = tree({".gitignore": "*.csv", "a.csv": "", "in/.gitignore": "!b.csv", "in/b.csv": "", "in/c.csv": ""})
    assert names(source) == [".gitignore", "in", "in/.gitignore", "in/b.csv"]


def test_an_invalid_ignore_pattern_is_an_error(tree: Callable[..., Path]) -> None:
    source = tree({"sub/.gitignore": "ok\n!\n"})
    with pytest.raises(ValueError, match=r"^working_dir: .*sub/\.gitignore has a pattern that means nothing"):
        scan(str(source))


def test_ignore_files_of_any_encoding(tree: Callable[..., Path]) -> None:
    source = tree({})
    (source / ".gitignore").write_bytes(b"\xef\xbb\xbfbom\nlatin-\xe9\n")
    for name in (b"bom", b"latin-\xe9", b"kept"):
        Path(os.fsdecode(os.path.join(os.fsencode(source), name))).touch()
    assert names(source) == [".gitignore", "kept"]


# -- links -------------------------------------------------------------------------------------------------------------


def links(made: Bundle) -> dict[str, str]:
    return {entry.name: entry.target for entry in made.manifest.entries if entry.kind == "link"}


def test_links_within_the_tree_stay_links(tree: Callable[..., Path]) -> None:
    source = tree({"d/file": "x", "e/": ""})
    (source / "relative").symlink_to("d/file")
    (source / "absolute").symlink_to(source / "d")
    (source / "e/up").symlink_to("../d/file")
    (source / "e/out-and-in").symlink_to(f"../../{source.name}/d/file")
    (source / "chain").symlink_to("relative")
    (source / "self").symlink_to(".")
    assert links(bundle_directory(str(source))) == {
        "relative": "d/file",
        "absolute": "d",
        "e/up": "../d/file",
        "e/out-and-in": "../d/file",
        "chain": "d/file",
        "self": ".",
    }


def test_links_out_of_the_tree_are_followed(tree: Callable[..., Path], tmp_path: Path, there: Path) -> None:
    outside = tree({"lib/a.py": "a", "lib/b/c.py": "c", "one": "1"}, "outside")
    (outside / "lib/inner").symlink_to("b/c.py")
    (outside / "lib/far").symlink_to(outside / "one")
    source = tree({"x.py": ""})
    (source / "lib").symlink_to(outside / "lib")
    (source / "one").symlink_to("../outside/one")
    made = bundle_directory(str(source))
    assert links(made) == {"lib/inner": "b/c.py", "lib/far": "../one"}
    (target,) = installed(there, made)
    shutil.rmtree(outside)
    assert (target / "lib/b/c.py").read_text() == (target / "lib/inner").read_text() == "c"
    assert (target / "one").read_text() == (target / "lib/far").read_text() == "1"


def test_links_to_ignored_files_are_followed(tree: Callable[..., Path]) -> None:
    source = tree({".gitignore": "cache/", "cache/big": "x", "cache/more": ""})
    (source / "latest").symlink_to("cache/big")
    assert names(source) == [".gitignore", "latest"]
    assert bundle_directory(str(source)).size == len("cache/") + 1


def test_a_link_can_be_ignored(tree: Callable[..., Path], tmp_path: Path) -> None:
    source = tree({".rayignore": "data/\nhere", "x": ""})
    (source / "data").symlink_to(tmp_path)
    (source / "here").symlink_to("x")
    assert names(source) == [".rayignore", "x"]


def test_dangling_links_are_kept(tree: Callable[..., Path]) -> None:
    source = tree({"f": ""})
    told = {".#f": "me@host.123:45", "far": "/not/here", "round": "round", "file": "f/below"}
    for name, target in told.items():
        (source / name).symlink_to(target)
    assert links(bundle_directory(str(source))) == told


@pytest.mark.parametrize("target", ["..", "../..", "/"])
def test_a_link_to_a_parent_directory_is_an_error(tree: Callable[..., Path], target: str) -> None:
    source = tree({"d/e/": ""})
    (source / "d/e/around").symlink_to(os.path.join(source, target))
    with pytest.raises(ValueError, match=r"^working_dir: the link .*/d/e/around leads to .*, which contains it; remove it"):
        scan(str(source))


def test_a_cycle_of_links_outside_the_tree_ends(tree: Callable[..., Path]) -> None:
    outside = tree({"b/": ""}, "outside")
    source = tree({"d/": ""})
    (source / "d/out").symlink_to(outside / "b")
    (outside / "b/back").symlink_to(source / "d")
    assert links(bundle_directory(str(source))) == {"d/out/back": ".."}


# -- what cannot be sent -----------------------------------------------------------------------------------------------


def test_special_files_are_refused(tree: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    source = tree({"d/": ""})
    monkeypatch.chdir(source / "d")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("s.sock")
        with pytest.raises(ValueError, match=rf"^working_dir: {source}/d/s.sock is a socket, .* list .* in {source}/.rayignore"):
            scan(str(source))
    os.unlink("s.sock")
    os.mkfifo("pipe")
    with pytest.raises(ValueError, match=r"pipe is a named pipe"):
        scan(str(source))
    Path(source, ".rayignore").write_text("pipe\n")
    assert names(source) == [".rayignore", "d"]
    with pytest.raises(ValueError, match=r"^extra_files: /dev/null is a device"):
        scan_files({"null": "/dev/null"})


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Root may read everything."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("path", ["d/secret", "d/closed", "d/closed/in"])
def test_unreadable_files_are_refused(tree: Callable[..., Path], path: str) -> None:
    source = tree({"d/secret": "x", "d/closed/in": "x"}, tempfile.mkdtemp(dir="/tmp"))
    source.chmod(0o755)
    target = source / path
    if path.endswith("in"):
        (source / "link").symlink_to(target)
        (source / ".rayignore").write_text("closed/\n")
        target = source / "d/closed"
    target.chmod(0)
    codecs.lookup("utf-8-sig")  # Another user may not be allowed to read Python's own directory.
    try:
        with (
            as_nobody(),
            pytest.raises(ValueError, match=r"^working_dir: .*(secret|closed|link) cannot be read: Permission denied"),
        ):
            bundle_directory(str(source))
    finally:
        target.chmod(0o700)
        shutil.rmtree(source)


def test_too_large_a_bundle_is_refused(tree: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    source = tree(
        {"data/deep/a.bin": "", "data/small": "x", "models/m1": "x" * 30_000, "models/m2": "x" * 30_000, "code.py": "x"}
    )
    with open(source / "data/deep/a.bin", "wb") as file:
        file.truncate(600 * 2**20)
    with pytest.raises(ValueError) as caught:
        scan(str(source))
    assert str(caught.value) == (
        f"working_dir: {source} would be 600 MiB, more than 500 MiB; the largest are data/deep/ (600 MiB), "
        "models/m1 (29 KiB), models/m2 (29 KiB), code.py (1 bytes), data/small (1 bytes); "
        f"list what payloads do not need in {source}/.rayignore, and keep data on the cluster, in the directory that payloads "
        "find in RAYSLURM_DATA_DIR"
    )
    with monkeypatch.context() as patch:
        patch.setattr(bundle, "MAX_BYTES", 2**30)
        assert scan(str(source)).size > 600 * 2**20
    (source / ".rayignore").write_text("*.bin")
    assert scan(str(source)).size < 2**20


def test_too_many_entries_are_refused(tree: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "MAX_ENTRIES", 30)
    source = tree({f"runs/{number}": "" for number in range(40)} | {"a": ""})
    with pytest.raises(ValueError, match=r"would be more than 30 files and directories, most of them in runs/ \(\d+\)"):
        scan(str(source))


@pytest.mark.parametrize("change", ["shrink", "same size", "gone"])
def test_a_file_that_changes_while_it_is_read(tree: Callable[..., Path], there: Path, change: str) -> None:
    source = tree({"a": "a" * 5000, "b.log": "b" * 5000})
    made = bundle_directory(str(source))
    file = source / "b.log"
    found = file.stat()
    texts = {"shrink": "b", "same size": "c" * 5000}
    if change in texts:
        file.write_text(texts[change])
        os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns))
    else:
        file.unlink()
    with pytest.raises(ValueError, match=r"^working_dir: .*b\.log changed while it was being copied; try again"):
        installed(there, made)
    assert not (there / "bundles").exists()


def test_a_log_may_grow_while_it_is_read(tree: Callable[..., Path], there: Path) -> None:
    source = tree({"a.log": "one\n"})
    made = bundle_directory(str(source))
    with (source / "a.log").open("a") as file:
        file.write("two\n")
    (target,) = installed(there, made)
    assert (target / "a.log").read_text() == "one\n"


def test_the_home_that_dagster_dev_makes_is_left_out(tree: Callable[..., Path]) -> None:
    assert [each.name for each in scan(str(tree({"a": "", ".tmp_dagster_home_x1/history/index.db": ""}))).entries] == ["a"]


def test_the_group_of_a_project_directory_is_kept(tree: Callable[..., Path], there: Path) -> None:
    """A site may give the disk quota to the group, by the setgid bit of the directory above."""
    there.mkdir(exist_ok=True)
    there.chmod(0o2750)
    (target,) = installed(there, bundle_directory(str(tree({"a": ""}))))
    assert target.parent.stat().st_mode & 0o7777 == 0o2700


def test_an_ordinary_user_unpacks_a_directory_beside_a_file_of_the_same_stem(tree: Callable[..., Path]) -> None:
    """GNU tar makes a directory read-only as soon as it meets an entry that is not below it."""
    files = {"pkg/a.py": "1", "pkg/sub/b.py": "2", "pkg/sub.py": "3", "pkg-more/c.py": "4", "pkg.py": "5"}
    made = bundle_directory(str(tree(files)))
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:  # Others can enter /tmp.
        archive, target = Path(directory, "bundle.tar.gz"), Path(directory, "target")
        with archive.open("wb") as file:
            made.write_archive(file)
        target.mkdir()
        for path in (directory, target):
            os.chmod(path, 0o777)
        user = {"user": "nobody"} if os.geteuid() == 0 else {}
        subprocess.run(["tar", "-x", "-z", "-m", "-C", target, "-f", archive], check=True, **user)  # type: ignore[call-overload]
        assert {name: (target / name).read_text() for name in files} == files


def test_named_files(tree: Callable[..., Path], there: Path) -> None:
    source = tree({"data/.gitignore": "*\n", "data/x.csv": "1", "data/__pycache__/m.pyc": "", "run.py": "2", "odd\nname": "3"})
    (source / "link.py").symlink_to("run.py")
    files = {"extra/data": source / "data", "script.py": source / "link.py", "odd\nname": source / "odd\nname"}
    (target,) = installed(there, bundle_files({name: str(path) for name, path in files.items()}))
    assert sorted(content(os.fsencode(target))) == [
        b"extra",
        b"extra/data",
        b"extra/data/.gitignore",
        b"extra/data/x.csv",
        b"odd\nname",
        b"script.py",
    ]
    assert not (target / "script.py").is_symlink() and (target / "script.py").read_text() == "2"


@pytest.mark.parametrize("name", ["", "/a", "../a", "a/../b", "a//b", "a/", ".", "a\0b"])
def test_names_that_leave_a_bundle(name: str) -> None:
    with pytest.raises(ValueError, match=r"^extra_files: .* is not the name of a file in a bundle"):
        scan_files({name: __file__})


def test_names_below_one_another() -> None:
    with pytest.raises(ValueError, match=r"'a/b' would stand in 'a'"):
        scan_files({"a/b": __file__, "a": __file__})
    assert make_bundle(scan_files({})).size == 0


# -- how they get there ------------------------------------------------------------------------------------------------


def test_what_is_there_costs_one_small_command(tree: Callable[..., Path], there: Path) -> None:
    source = tree({"a.py": "x"})
    (source / "big").write_bytes(os.urandom(3 * 2**20))
    made, small = bundle_directory(str(source)), bundle_files({"a.py": str(source / "a.py")})
    first, second = Counting(), Counting()
    progress: list[tuple[int, int]] = []
    install(first, str(there), [made, small], lambda *told: progress.append(told))
    assert first.uploads == 1 and first.commands == 5  # Two looks, and one for each of three things.
    assert progress[-1][1] >= 3 * 2**20 and progress[-1][0] == progress[-1][1]
    install(second, str(there), [made, small])
    assert (second.commands, second.uploads) == (1, 0)


def test_the_runtime_is_installed_with_bundles(there: Path) -> None:
    runtime = installed_runtime(there)
    assert runtime.read_bytes() == archive.build_runtime() and runtime == there / "runtime" / archive.runtime_name()
    said = subprocess.run([sys.executable, "-I", runtime], capture_output=True, text=True)
    assert "runtime.pyz run DIR" in said.stderr
    assert stat.S_IMODE(runtime.stat().st_mode) == 0o400


def test_installed_files_are_private_and_read_only(tree: Callable[..., Path], there: Path) -> None:
    source = tree({"d/run.sh": "", "d/x": ""})
    (source / "d/run.sh").chmod(0o777)
    (source / "d/x").chmod(0o666)
    before = os.umask(0)
    try:
        (target,) = installed(there, bundle_directory(str(source)))
    finally:
        os.umask(before)
    modes = {path: oct(stat.S_IMODE(path.lstat().st_mode)) for path in [there, *there.rglob("*")]}
    assert set(modes.values()) == {"0o700", "0o500", "0o400"}
    assert [modes[target / name] for name in ("", "d", "d/run.sh", "d/x")] == ["0o500", "0o500", "0o500", "0o400"]
    assert modes[target.parent] == modes[there] == "0o700"


def test_our_own_directories_are_closed_to_the_group(there: Path) -> None:
    """On a file system with default ACLs, or by a `chmod -R g+w`, they may be open, whatever the umask is."""
    own = ("bundles", "runtime", "runs", "sessions")
    for name in own:
        (there / name).mkdir(parents=True)
        (there / name).chmod(0o2775)
    install(LocalConnection(), str(there), [])
    assert {(there / name).stat().st_mode & 0o777 for name in own} == {0o700}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to any group")
@pytest.mark.parametrize(
    ("mode", "group", "told"), [(0o2775, 100, True), (0o3775, 100, False), (0o775, 0, False), (0o755, 100, False)]
)
def test_a_group_writable_base_directory_is_a_warning(there: Path, mode: int, group: int, told: bool) -> None:
    """The group of that name is the user's own; with a sticky bit nobody else can replace what is in it."""
    there.mkdir(parents=True)
    os.chown(there, -1, group)
    there.chmod(mode)
    said: list[str] = []
    install(LocalConnection(), str(there), [], warn=said.append)
    assert bool(said) is told
    assert not told or f"group users may write to {there}, and so change what runs there; run: chmod g-w {there}" in said[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("whose", [".", "bundles", "runtime"])
def test_directories_of_another_user_are_refused(tree: Callable[..., Path], there: Path, whose: str) -> None:
    made = bundle_directory(str(tree({"a": ""})))
    install(LocalConnection(), str(there), [made])
    os.chown(there / whose, 65534, 65534)
    connection = Counting()
    with pytest.raises(PermissionError, match=r"this machine: .* belongs to nobody, who could change what runs there"):
        install(connection, str(there), [made])
    assert (connection.commands, connection.uploads) == (1, 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_files_of_another_user_are_not_used(tree: Callable[..., Path], there: Path) -> None:
    made = bundle_directory(str(tree({"a": ""})))
    (bundle,), runtime = installed(there, made), installed_runtime(there)
    runtime.chmod(0o600)
    runtime.write_text("theirs")
    os.chown(runtime, 65534, 65534)
    install(LocalConnection(), str(there), [made])
    assert runtime.read_bytes() == archive.build_runtime()
    assert runtime.stat().st_uid == 0
    os.chown(bundle, 65534, 65534)
    with pytest.raises(OSError, match=f"{made.name} cannot be made"):
        install(LocalConnection(), str(there), [made])


def test_a_used_bundle_is_touched(tree: Callable[..., Path], there: Path) -> None:
    made = bundle_directory(str(tree({"a": ""})))
    (target,) = installed(there, made)
    runtime = installed_runtime(there)
    for path in (target, runtime):
        os.utime(path, (1, 1))
    installed(there, made)
    assert target.stat().st_mtime > 1e9 and runtime.stat().st_mtime > 1e9


def test_one_of_many_threads_sends_a_bundle(tree: Callable[..., Path], there: Path) -> None:
    source = tree({"a.py": "x"})
    (source / "big").write_bytes(os.urandom(3 * 2**20))
    made = bundle_directory(str(source))
    connections = [Counting() for _ in range(6)]
    threads = [threading.Thread(target=install, args=(each, str(there), [made])) for each in connections]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(each.uploads for each in connections) == 1
    assert content(os.fsencode(there / "bundles" / made.name)) == content(os.fsencode(source))
    assert own_leftovers(there) == []


INSTALL = """
import sys
from dagster_rayslurm.upload.bundle import bundle_directory
from dagster_rayslurm.upload.deliver import install
from dagster_rayslurm.ssh.local import LocalConnection
sys.stdin.readline()
install(LocalConnection(), sys.argv[2], [bundle_directory(sys.argv[1])])
"""


def test_several_machines_install_at_once(tree: Callable[..., Path], there: Path, tmp_path: Path) -> None:
    source = tree({f"d{number % 7}/f{number}": str(number) for number in range(400)})
    (source / "big").write_bytes(os.urandom(3 * 2**20))
    processes = []
    for _ in range(3):
        command = [sys.executable, "-c", INSTALL, str(source), str(there)]
        private = Path(tempfile.mkdtemp(dir="/tmp"))  # Locks are in it: these processes do not see each other's.
        environment = {**os.environ, "XDG_RUNTIME_DIR": str(private)}
        processes.append((subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, cwd=os.getcwd()), private))
    for process, _ in processes:
        assert process.stdin is not None
        process.stdin.write(b"go\n")
        process.stdin.flush()
    for process, private in processes:
        process.communicate()
        assert process.returncode == 0
        shutil.rmtree(private)
    (target,) = (there / "bundles").iterdir()
    assert content(os.fsencode(target)) == content(os.fsencode(source))
    assert own_leftovers(there) == []


class Cutting(LocalConnection):
    """A transfer that says it is complete, and is not."""

    def upload(self, local_path: str, path: str, progress: Any = None, mode: int = 0o600) -> None:
        super().upload(local_path, path, progress, mode)
        os.truncate(path, os.path.getsize(path) // 2)


def test_a_truncated_archive_is_never_visible(tree: Callable[..., Path], there: Path) -> None:
    source = tree({"a": ""})
    (source / "big").write_bytes(os.urandom(3 * 2**20))
    made = bundle_directory(str(source))
    with pytest.raises(OSError, match=rf"this machine: {there}/bundles/{made.name} cannot be made: .*gzip"):
        installed(there, made, connection=Cutting())
    assert list((there / "bundles").iterdir()) == []
    (target,) = installed(there, made)
    assert content(os.fsencode(target)) == content(os.fsencode(source))


@pytest.mark.parametrize("size", [10, 3 * 2**20])
def test_a_call_that_is_repeated_after_a_lost_connection(tree: Callable[..., Path], there: Path, size: int) -> None:
    source = tree({})
    (source / "f").write_bytes(os.urandom(size))

    class Repeats(LocalConnection):
        def call(self, function: Any, *arguments: Any, **named: Any) -> Any:
            assert named["repeat"]
            super().call(function, *arguments, **named)  # Its answer is lost.
            return super().call(function, *arguments, **named)

    (target,) = installed(there, bundle_directory(str(source)), connection=Repeats())
    assert content(os.fsencode(target)) == content(os.fsencode(source))
    assert own_leftovers(there) == []


@pytest.mark.parametrize(
    ("function", "limit", "doing"), [(base_directory.look, 300, "looking at"), (base_directory.install_file, 600, "making")]
)
def test_a_file_system_that_does_not_answer(function: Any, limit: int, doing: str, there: Path) -> None:
    class Hangs(LocalConnection):
        def call(self, called: Any, *arguments: Any, repeat: bool = False, timeout: float | None = None) -> Any:
            if called is function:
                assert timeout == limit
                raise TimeoutError
            return super().call(called, *arguments)

    with pytest.raises(TimeoutError, match=rf"machine: {doing} {there}.* took over {limit} s and was ended; the file system of"):
        install(Hangs(), str(there), [])


def test_a_full_disk_there(tree: Callable[..., Path], tmp_path: Path) -> None:
    source = tree({})
    (source / "big").write_bytes(bytes(3 * 2**20))  # The archive fits, its content does not.
    with small_disk(tmp_path / "disk", "2m") as disk:
        made = bundle_directory(str(source))
        with pytest.raises(OSError, match=r"cannot be made: tar: (big|.*No space left)"):
            installed(disk / "base", made)
        assert list((disk / "base/bundles").iterdir()) == []


def test_a_full_disk_here(tree: Callable[..., Path], tmp_path: Path, there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tree({})
    (source / "big").write_bytes(os.urandom(3 * 2**20))
    with small_disk(tmp_path / "disk", "2m") as disk:
        monkeypatch.setattr(tempfile, "tempdir", str(disk))
        with pytest.raises(
            OSError, match=rf"^{disk}/rayslurm-.* cannot be written before it goes to this machine: No space left"
        ):
            installed(there, bundle_directory(str(source)))
        assert list(disk.iterdir()) == []


def test_a_base_directory_below_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"file/base/runtime.*Not a directory"):
        install(LocalConnection(), str(tmp_path / "file/base"), [])


def test_options_of_tar_in_the_environment(tree: Callable[..., Path], there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAR_OPTIONS", "--exclude=*.py")
    (target,) = installed(there, bundle_directory(str(tree({"a.py": "x"}))))
    assert (target / "a.py").read_text() == "x"
