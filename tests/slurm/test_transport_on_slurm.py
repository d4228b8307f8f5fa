"""Bundles, the runtime, the look at an environment and the sweep, over SSH to a cluster with compute nodes."""

import contextlib
import os
import subprocess
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dagster_rayslurm import SSHConnectionResource
from dagster_rayslurm.backends.base import sweep_remote
from dagster_rayslurm.environments import InheritedEnvironment, Interpreter, PreDeployedEnvironment
from dagster_rayslurm.environments.check import check_environment_on
from dagster_rayslurm.errors import StartError
from dagster_rayslurm.runtime.protocol.spec import RaySpec
from dagster_rayslurm.ssh.base import Connection
from dagster_rayslurm.ssh.pool import new_connection
from dagster_rayslurm.upload.bundle import bundle_directory, bundle_files
from dagster_rayslurm.upload.deliver import install, place_of, runtime_place


@pytest.fixture(scope="module")
def edge(stack: Any) -> Iterator[Connection]:
    names = {"HOST": "host", "PORT": "port", "USER": "user", "KEY_PATH": "key_path", "KNOWN_HOSTS_FILE": "known_hosts_file"}
    fields: dict[str, Any] = {field: stack.env[f"SLURM_EDGE_NODE_{name}"] for name, field in names.items()}
    connection = new_connection(SSHConnectionResource(**{**fields, "port": int(fields["port"])}))
    yield connection
    connection.close()


@pytest.fixture
def base(edge: Connection) -> Iterator[str]:
    """A base directory in the home directory, which the nodes share."""
    path = f"{edge.home()}/transport {uuid.uuid4().hex[:12]}"
    yield path
    edge.run(["sh", "-c", '[ ! -e "$1" ] || { chmod -R u+w "$1"; rm -rf "$1"; }', "sh", path])


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A working directory with all kinds of names."""
    top = tmp_path / "source"
    for name in ("pkg/train.py", 'it\'s "odd"\n$HOME/-rf *', "ünï/code", "d" * 200 + "/" + "f" * 200):
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text(f"print({name!r})")
    Path(os.fsdecode(os.path.join(os.fsencode(top), b"\xff\xfe"))).write_bytes(b"\x00\xff")
    (top / "empty").mkdir()
    (top / "tool.sh").write_text("#!/bin/sh\necho it runs\n")
    (top / "tool.sh").chmod(0o755)
    (top / "link").symlink_to("pkg/train.py")
    (top / "pkg/up").symlink_to("../tool.sh")
    (top / "nowhere").symlink_to("/not/here")
    return top


class Counting:
    """A connection, and what it was asked to do."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name in ("run", "call", "upload", "write", "make_dir", "read", "remove"):
            self.asked.append(name)
        return getattr(self._connection, name)


LISTING = (  # Names, kinds, links, contents and executable bits of a tree.
    "find . -printf '%P %y %l\\0' | LC_ALL=C sort -z | sha256sum; "
    "find . -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum --zero | sha256sum; "
    "find . -type f -perm -100 -printf '%P\\0' | LC_ALL=C sort -z | sha256sum"
)


def listing(directory: Path) -> str:
    """The same of a tree on this machine."""
    return subprocess.run(["sh", "-c", LISTING], cwd=directory, capture_output=True, text=True, check=True).stdout


def run(edge: Connection, *command: str) -> str:
    done = edge.run(command, timeout=60)
    assert done.returncode == 0, done.stderr.decode("utf-8", "replace")
    return done.stdout.decode()


def on_a_node(edge: Connection, *command: str) -> str:
    return run(edge, "srun", "--partition=compute", "--nodes=1", "--mem=50", "--cpu-bind=none", *command)


def test_a_tree_arrives_and_the_nodes_see_it(edge: Connection, base: str, source: Path) -> None:
    made = bundle_directory(str(source))
    install(edge, base, [made])
    path = place_of(base, made)
    on_edge = run(edge, "sh", "-c", f'cd "$1" && {LISTING}', "sh", path)
    assert on_edge == listing(source)
    on_node = on_a_node(edge, "sh", "-c", f'cd "$1" && {LISTING}; ./pkg/up; python3 ./link', "sh", path)
    assert on_node == on_edge + "it runs\npkg/train.py\n"


def test_the_runtime_starts_on_a_node(edge: Connection, base: str, stack: Any) -> None:
    install(edge, base, [])
    runtime = runtime_place(base)
    said = on_a_node(edge, "sh", "-c", '"$1" -I "$2" 2>&1; true', "sh", f"{stack.env['RAYSLURM_ENV_PATH']}/bin/python", runtime)
    assert "runtime.pyz run DIR" in said


def test_a_payload_cannot_change_what_others_use(edge: Connection, base: str, source: Path) -> None:
    made = bundle_directory(str(source))
    install(edge, base, [made])
    path = place_of(base, made)
    before = run(edge, "sh", "-c", f'cd "$1" && {LISTING}', "sh", path)
    for attempt in ("echo x >>link", "echo x >pkg/new", "rm tool.sh", "mv pkg other", "mkdir empty/d", "ln -s x empty/l"):
        done = edge.run(["sh", "-c", f'cd "$1" && {attempt}', "sh", path])
        assert done.returncode and b"ermission denied" in done.stderr, attempt
    assert run(edge, "sh", "-c", f'cd "$1" && {LISTING}', "sh", path) == before


def test_nobody_else_reads_it(edge: Connection, base: str, source: Path, stack: Any) -> None:
    made = bundle_directory(str(source))
    install(edge, base, [made])
    assert run(edge, "find", base, "!", "-type", "l", "-perm", "/077") == ""
    for path in (place_of(base, made), runtime_place(base)):
        said = stack.exec("edge", ["ls", path], user="other", check=False)
        assert "Permission denied" in said


def test_what_is_there_costs_one_small_call(edge: Connection, base: str, source: Path) -> None:
    (source / "big").write_bytes(os.urandom(12 * 2**20))
    made, script = bundle_directory(str(source)), bundle_files({"train.py": str(source / "pkg/train.py")})
    progress: list[tuple[int, int]] = []
    first = Counting(edge)
    install(first, base, [made, script], lambda *told: progress.append(told))  # type: ignore[arg-type]
    assert first.asked.count("upload") == 1 and progress[-1][0] == progress[-1][1] > 12 * 2**20 and len(progress) > 10
    second = Counting(edge)
    install(second, base, [made, script])  # type: ignore[arg-type]
    assert second.asked == ["call"]
    (source / "pkg/train.py").write_text("print(2)")
    changed = bundle_files({"train.py": str(source / "pkg/train.py")})
    third = Counting(edge)
    install(third, base, [made, changed])  # type: ignore[arg-type]
    path = place_of(base, changed)
    assert third.asked == ["call", "call"]
    assert run(edge, "cat", f"{path}/train.py") == "print(2)"


def test_a_connection_that_breaks_while_it_is_sent(
    connect: Callable[..., Any],
    server: Any,
    base: str,
    edge: Connection,
    source: Path,
) -> None:
    (source / "big").write_bytes(os.urandom(60 * 2**20))
    made = bundle_directory(str(source))
    connection = connect(server, "paramiko")
    sent = threading.Event()
    broken = threading.Event()

    def progress(done: int, size: int) -> None:
        if done > size / 4 and not sent.is_set():
            sent.set()
            broken.wait(20)

    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(install(connection, base, [made], progress)))
    thread.start()
    assert sent.wait(60)
    server.stop()
    server.start()
    broken.set()
    thread.join(120)
    assert found
    assert run(edge, "sh", "-c", f'cd "$1" && {LISTING}', "sh", place_of(base, made)) == listing(source)
    assert run(edge, "find", base, "-name", ".rs-*") == ""


def test_two_machines_at_once(edge: Connection, base: str, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (source / "big").write_bytes(os.urandom(6 * 2**20))
    made = bundle_directory(str(source))
    # Locks are this machine's: without them these are two machines.
    monkeypatch.setattr("dagster_rayslurm.upload.deliver.locked", lambda _: contextlib.nullcontext())
    found: list[Any] = []
    pair = [Counting(edge), Counting(edge)]
    threads = [threading.Thread(target=lambda each=each: found.append(install(each, base, [made]))) for each in pair]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 2
    assert run(edge, "sh", "-c", f'cd "$1" && {LISTING}', "sh", place_of(base, made)) == listing(source)
    assert run(edge, "find", base, "-name", ".rs-*") == ""


def test_read_only_trees_are_swept(edge: Connection, base: str, source: Path) -> None:
    made = bundle_directory(str(source))
    install(edge, base, [made])
    run_dir = f"{base}/runs/0123abcd-a-0123456789ab"
    run(edge, "mkdir", "-p", f"{run_dir}/work/closed/in")
    run(edge, "chmod", "-R", "500", f"{run_dir}/work/closed")
    run(edge, "ln", "-s", place_of(base, made), f"{run_dir}/work/link")
    assert sweep_remote(edge, base, 14, every_minutes=0) == []
    run(edge, "touch", "-d", "15 days ago", place_of(base, made), run_dir)
    removed = sweep_remote(edge, base, 14, every_minutes=0)
    assert sorted(removed) == [f"bundles/{made.name}", "runs/0123abcd-a-0123456789ab"]
    install(edge, base, [made])
    assert run(edge, "sh", "-c", f'cd "$1" && {LISTING}', "sh", place_of(base, made)) == listing(source)


# -- the environment ---------------------------------------------------------------------------------------------------


def look(connection: Any, path: str, base: str, **needs: Any) -> Interpreter:
    ray = RaySpec(ray_version=needs.get("ray_version")) if needs.get("needs_ray", True) else None
    return check_environment_on(
        connection, PreDeployedEnvironment(path=path), ray, needs.get("needs_pipes", True), f"{base}/environments"
    )


def test_the_environment_of_the_stack(edge: Connection, base: str, stack: Any) -> None:
    path = stack.env["RAYSLURM_ENV_PATH"]
    assert look(Counting(edge), path, base) == Interpreter(f"{path}/bin/python")
    again = Counting(edge)
    assert look(again, path, base) == Interpreter(f"{path}/bin/python")
    assert again.asked == ["call"]
    assert run(edge, "find", f"{base}/environments", "-perm", "/077") == ""
    with pytest.raises(StartError, match=r"^environment: on dev@.* has Ray 2\..*, and ray_version asks for 2.1.0"):
        look(edge, path, base, ray_version="2.1.0")


def test_what_is_no_environment_for_it(edge: Connection, base: str) -> None:
    with pytest.raises(StartError, match=r"on dev@\S+ /usr has no Ray; install it there"):
        look(edge, "/usr", base)
    assert look(edge, "/usr", base, needs_ray=False, needs_pipes=False) == Interpreter("/usr/bin/python3")
    with pytest.raises(StartError, match=r"on dev@\S+ there is no directory \S+/not-here"):
        look(edge, "~/not-here", base)
    run(edge, "mkdir", "-p", base)
    with pytest.raises(StartError, match="there is no directory /root/env, or this user cannot enter it"):
        look(edge, "/root/env", base)
    with pytest.raises(StartError, match="is not on the cluster; name the environment there"):
        check_environment_on(edge, InheritedEnvironment(), RaySpec(), True, base)


def test_an_environment_with_a_script(edge: Connection, base: str, stack: Any) -> None:
    path = f"{base}/my env"
    run(edge, "mkdir", "-p", path)
    real = stack.env["RAYSLURM_ENV_PATH"]
    edge.write(f"{path}/activate.sh", f"echo Welcome; echo >&2 Hello; export PATH={real}/bin:$PATH\n".encode())
    found = look(edge, path, base)
    assert found == Interpreter("python3", f"{path}/activate.sh")
    said = on_a_node(edge, *found.start("-c", "import sys; print(sys.prefix)"))
    assert said == f"Welcome\n{real}\n"
    edge.write(f"{path}/activate.sh", b"module load nothing-of-the-kind || exit 9\n")
    with pytest.raises(StartError, match=r"activate.sh failed with exit code 9: .*module: command not found"):
        look(Counting(edge), path, base)
