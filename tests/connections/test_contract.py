"""The contract of `Connection`, on this machine and on a real sshd with both clients."""

import hashlib
import os
import socket
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dagster_rayslurm.ssh.base import Connection
from dagster_rayslurm.ssh.connection import SSHConnection

from .fixtures import Place

# One connection for all examples of a property is what makes them quick.
many = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))

odd_text = st.binary(max_size=60).filter(lambda data: b"\0" not in data).map(os.fsdecode)
odd_name = (
    st.binary(min_size=1, max_size=200)
    .filter(lambda data: b"\0" not in data and b"/" not in data and data not in (b".", b".."))
    .map(os.fsdecode)
)
"""Names of files and arguments of commands, which need not be UTF-8."""


def test_exit_code_and_output_of_a_command(place: Place) -> None:
    done = place.connection.run(["sh", "-c", "printf out; printf err >&2; exit 3"])
    assert (done.returncode, done.stdout, done.stderr) == (3, b"out", b"err")


def test_exit_codes_of_a_signal_and_a_missing_program(place: Place) -> None:
    assert place.connection.run(["sh", "-c", "kill -9 $$"]).returncode == 137
    missing = place.connection.run(["no such program"])
    assert missing.returncode == 127 and b"no such program" in missing.stderr
    assert place.connection.run(["exit", "3"]).returncode in (3, 127)  # A shell's own word harms nothing.


@many
@given(words=st.lists(odd_text, max_size=6))
def test_arguments_are_passed_unchanged(place: Place, words: list[str]) -> None:
    done = place.connection.run(["printf", "%s\\0", *words, "the last"])
    assert done.stdout.split(b"\0")[:-1] == [os.fsencode(word) for word in [*words, "the last"]]


@pytest.mark.parametrize(
    "word", ["-n", "!!", "a!b", "$HOME", "`id`", "\\", "'", '"', "\n", "\r", "*", "~", "&", "%s", "@", "", "é\udcff"]
)
def test_arguments_with_special_characters(place: Place, word: str) -> None:
    assert place.connection.run(["printf", "%s", word]).stdout == os.fsencode(word)
    assert place.connection.run(["env", "printf", "<%s>", word, "if"]).stdout == b"<" + os.fsencode(word) + b"><if>"


def test_an_argument_with_nul_is_refused(place: Place) -> None:
    with pytest.raises(ValueError, match="NUL"):
        place.connection.run(["echo", "a\0b"])


@pytest.mark.parametrize("size", [0, 1, 4096, 70_000, 5_000_000])
def test_large_input_and_output(place: Place, size: int) -> None:
    data = os.urandom(size)
    assert place.connection.run(["cat"], stdin=data).stdout == data
    both = place.connection.run(["sh", "-c", "tee /dev/stderr"], stdin=data)
    assert both.stdout == data and both.stderr == data


def test_a_command_need_not_read_its_input(place: Place) -> None:
    assert place.connection.run(["true"], stdin=bytes(3_000_000)).returncode == 0
    assert place.connection.run(["head", "-c", "3"], stdin=b"abcdef" * 500_000).stdout == b"abc"


def test_background_processes_are_not_waited_for(place: Place) -> None:
    noisy = "(for i in 1 2 3 4 5 6; do sleep 0.2; echo late; echo late >&2; done; sleep 20) & echo x"
    assert place.connection.run(["sh", "-c", noisy], timeout=15).stdout == b"x\n"
    time.sleep(1.5)


def test_a_long_command_line(place: Place) -> None:
    word = "x" * 100_000
    assert place.connection.run(["printf", "%s", word]).stdout == word.encode()


def test_a_timeout_kills_the_command_and_its_children(place: Place) -> None:
    mark = f"3{os.getpid()}.{time.monotonic_ns()}"
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="took over 1 s"):
        place.connection.run(["sh", "-c", f"sleep {mark} & (trap '' TERM; sleep {mark}) & sleep {mark}"], timeout=1)
    assert time.monotonic() - began < 30
    deadline = time.monotonic() + 30
    while sleeping(place.connection, mark):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def sleeping(connection: Connection, mark: str) -> bytes:
    return connection.run(["sh", "-c", f"ps -eo args= | grep '^sleep {mark[:-1]}[{mark[-1]}]'"]).stdout


def test_reading(place: Place) -> None:
    path = os.path.join(place.dir, "file")
    assert place.connection.read(path, 0, 10) == b""  # Not there yet.
    place.connection.write(path, b"0123456789")
    assert place.connection.read(path, 0, 100) == b"0123456789"
    assert place.connection.read(path, 4, 3) == b"456"
    assert place.connection.read(path, 10, 5) == b"" and place.connection.read(path, 99, 5) == b""


@pytest.mark.parametrize("size", [32767, 32768, 32769, 65536, 1_000_000, 3_000_000])
def test_large_reads_have_no_gaps(place: Place, size: int) -> None:
    path, data = os.path.join(place.dir, "file"), os.urandom(size)
    place.connection.write(path, data)
    assert place.connection.read(path, 0, size) == data
    got = b""
    while part := place.connection.read(path, len(got), 1024 * 1024):
        got += part
    assert got == data


@many
@given(name=odd_name, data=st.binary(max_size=2000))
def test_files_of_any_name_and_content(place: Place, name: str, data: bytes) -> None:
    path = os.path.join(place.dir, name)
    place.connection.write(path, data)
    assert place.connection.read(path, 0, 10_000) == data
    place.connection.remove(path)
    assert place.connection.read(path, 0, 10_000) == b""


@many
@given(names=st.lists(odd_name, min_size=1, max_size=3))
def test_directories_of_any_name(place: Place, names: list[str]) -> None:
    path = os.path.join(place.dir, "d", *names)
    place.connection.make_dir(path)
    place.connection.make_dir(path)
    place.connection.write(os.path.join(path, "f"), b"x")
    assert place.connection.read(os.path.join(path, "f"), 0, 1) == b"x"
    place.connection.remove(os.path.join(place.dir, "d"))


def test_the_longest_file_name(place: Place) -> None:
    path = os.path.join(place.dir, "n" * 255)
    place.connection.write(path, b"x")
    assert place.connection.read(path, 0, 1) == b"x"


def test_a_write_is_atomic_and_leaves_no_temporary_file(place: Place) -> None:
    path, stop, seen = os.path.join(place.dir, "file"), threading.Event(), set()
    contents = [bytes([65 + index]) * 50_000 for index in range(4)]
    place.connection.write(path, contents[0])

    def read_all() -> None:
        while not stop.is_set():
            seen.add(hashlib.sha256(place.connection.read(path, 0, 60_000)).hexdigest())

    reader = threading.Thread(target=read_all)
    reader.start()
    for index in range(30):
        place.connection.write(path, contents[index % 4])
    stop.set()
    reader.join()
    assert seen <= {hashlib.sha256(content).hexdigest() for content in contents}
    assert place.connection.run(["ls", "-A", place.dir]).stdout == b"file\n"


def test_modes(place: Place) -> None:
    path = os.path.join(place.dir, "a", "b")
    place.connection.make_dir(path)
    for name, mode in {"private": 0o600, "program": 0o755, "open": 0o666}.items():
        place.connection.write(os.path.join(path, name), b"", mode)
    done = place.connection.run(
        ["stat", "-c", "%a", path, *(os.path.join(path, name) for name in ("private", "program", "open"))]
    )
    assert done.stdout.split() in ([b"700", b"600", b"755", b"666"], [b"700", b"600", b"755", b"644"])


def test_errors_of_the_file_system(place: Place) -> None:
    missing = os.path.join(place.dir, "no", "file")
    with pytest.raises(FileNotFoundError) as caught:
        place.connection.write(missing, b"x")
    assert "file" in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(FileNotFoundError):
        place.connection.download(missing, os.path.join("/tmp", "never"))
    place.connection.write(os.path.join(place.dir, "plain"), b"x")
    for path in ("plain", "plain/below"):
        with pytest.raises(OSError):
            place.connection.make_dir(os.path.join(place.dir, path))
    with pytest.raises(OSError):
        place.connection.write(place.dir, b"x")
    assert place.connection.run(["ls", "-A", place.dir]).stdout == b"plain\n"


def test_removing(place: Place) -> None:
    tree = os.path.join(place.dir, "tree")
    place.connection.make_dir(os.path.join(tree, "sub"))
    place.connection.write(os.path.join(tree, "sub", "-rf"), b"x")
    place.connection.run(["ln", "-s", place.dir, os.path.join(tree, "link")])
    place.connection.remove(os.path.join(tree, "link"))
    assert place.connection.read(os.path.join(tree, "sub", "-rf"), 0, 1) == b"x"
    place.connection.remove(tree)
    place.connection.remove(tree)  # Not there any more, and no error.
    assert place.connection.run(["ls", "-A", place.dir]).stdout == b""


def test_a_failed_removal_is_an_error(place: Place) -> None:
    with pytest.raises(OSError, match="removing" if isinstance(place.connection, SSHConnection) else "."):
        place.connection.remove("/proc/version")


def test_the_time_of_a_file(place: Place) -> None:
    path = os.path.join(place.dir, "file")
    assert place.connection.modified(path) is None
    place.connection.write(path, b"x")
    place.connection.run(["touch", "-d", "@1000000000", path])
    assert place.connection.modified(path) == 1000000000 and place.connection.modified("/")


def test_copies_of_200_mb_with_progress(place: Place, tmp_path: Path) -> None:
    here, back = tmp_path / "big here", tmp_path / "new dir" / "big back"
    digest = hashlib.sha256()
    with open(here, "wb") as file:
        for _ in range(200):
            block = os.urandom(1_000_000)
            digest.update(block)
            file.write(block)
    reports: list[tuple[int, int]] = []
    path = os.path.join(place.dir, "big there")
    place.connection.upload(str(here), path, lambda done, size: reports.append((done, size)), 0o640)
    assert reports[-1] == (200_000_000, 200_000_000) and len(reports) >= 100 and reports == sorted(reports)
    assert place.connection.run(["sha256sum", path]).stdout.startswith(digest.hexdigest().encode())
    assert place.connection.run(["stat", "-c", "%a", path]).stdout == b"640\n"
    reports.clear()
    place.connection.download(path, str(back), lambda done, size: reports.append((done, size)))
    assert reports[-1] == (200_000_000, 200_000_000) and reports == sorted(reports)
    assert hashlib.sha256(back.read_bytes()).digest() == digest.digest()
    assert [entry.name for entry in back.parent.iterdir()] == ["big back"]
    assert stat.S_IMODE(back.stat().st_mode) == 0o644


def test_many_threads_at_once(place: Place) -> None:
    def work(index: int) -> None:
        path = os.path.join(place.dir, f"file {index}")
        for turn in range(4):
            data = f"{index}-{turn}".encode() * 5000
            place.connection.write(path, data)
            assert place.connection.read(path, 0, len(data)) == data
            assert place.connection.run(["cat", path]).stdout == data

    with ThreadPoolExecutor(24) as pool:
        list(pool.map(work, range(24)))


ECHO = """
import socketserver, sys
class Echo(socketserver.BaseRequestHandler):
    def handle(self):
        while data := self.request.recv(65536):
            self.request.sendall(data)
server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo)
server.daemon_threads = True
print(server.server_address[1], file=open(sys.argv[1] + "~", "w"))
import os; os.rename(sys.argv[1] + "~", sys.argv[1])
server.serve_forever()
"""


def test_several_streams_at_once(place: Place) -> None:
    announced = os.path.join(place.dir, "port")
    server = threading.Thread(target=serve_until_timeout, args=(place.connection, announced))
    server.start()
    deadline = time.monotonic() + 10
    while not (port := place.connection.read(announced, 0, 20)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    data = os.urandom(2_000_000)

    def talk(_: int) -> bytes:
        with place.connection.connect("127.0.0.1", int(port), 20) as client:
            threading.Thread(target=lambda: (client.sendall(data), client.shutdown(socket.SHUT_WR))).start()
            return b"".join(iter(lambda: client.recv(65536), b""))

    with ThreadPoolExecutor(12) as pool:
        assert all(echoed == data for echoed in pool.map(talk, range(12)))
    server.join()


def serve_until_timeout(connection: Connection, announced: str) -> None:
    with pytest.raises(TimeoutError):
        connection.run(["python3", "-c", ECHO, announced], timeout=4)


def test_a_stream_to_a_port_where_nothing_listens_ends(place: Place) -> None:
    try:
        with place.connection.connect("127.0.0.1", 1, 10) as client:
            assert client.recv(1) == b""
    except ConnectionError:
        pass


def test_a_closed_connection_connects_again(place: Place) -> None:
    place.connection.close()
    assert place.connection.run(["echo", "again"]).stdout == b"again\n"
    place.connection.close()
    assert place.connection.read(os.path.join(place.dir, "none"), 0, 1) == b""
    place.connection.close()
