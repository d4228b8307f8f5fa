"""The agent: one process on the edge node that calls functions of this package for a client, many calls at the same time.

The client (Dagster's side) runs the command from `command_line` by SSH. This command prints a hello line; all output before the
hello line comes from the shell's start-up files. The command then reads the agent's program from standard input, so that nothing
has to be installed on the edge node. After that, client and agent send messages to each other. When standard input ends, the
agent kills all running commands and exits.

A message consists of one or more frames. A frame consists of the lengths of its header and its body, the header in JSON, and the
body in bytes. The client imports this module too, to encode and decode messages.
"""

import importlib
import json
import os
import signal
import struct
import sys
import threading
import zlib
from importlib.machinery import ModuleSpec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType
    from typing import Any

PACKAGE = "rayslurm_edge"  # Name of this package in the agent's process.
PART = 256 * 1024  # Most bytes of a frame's body, so that no large message holds up the others for long.
_LENGTHS = struct.Struct(">II")

# The word is printed twice, so that a shell that echoes its commands does not print the hello line.
_BOOT = (
    'import os,sys,zlib;os.write(1,("%%c%%s %%d.%%d%%c"%%(10,"%s"*2,sys.version_info[0],sys.version_info[1],10)).encode());'
    'i=os.fdopen(os.dup(0),"rb");exec(zlib.decompress(i.read(int(i.read(8)))).decode())'
)


def command_line(python: str, word: str) -> str:
    """Return the command by which a login shell starts the agent with the Python `python`.

    The agent prints a hello line that has the text `word` twice, and then reads its program, the bytes that `program` returns,
    from standard input. The command has the word only once, so the client can tell the hello line from the echo of a shell that
    echoes its commands.

    The command has Python code in single quotes. This code contains no newline, exclamation mark, backslash or single quote,
    because sh, csh or fish would interpret some of these characters even inside single quotes.
    """
    return f"exec {python} -I -S -X utf8 -c '{_BOOT % word}'"


def program(directory: str) -> bytes:
    """Return the agent's program: the bytes that the client first sends to the standard input of the command from `command_line`.

    The first eight bytes are decimal digits: the number of the bytes that follow. The other bytes are compressed Python source
    text, which contains all modules of this package, and calls `serve`. `directory` is the directory of this package.
    """
    texts = {}
    for name in sorted(os.listdir(directory)):
        if name.endswith(".py"):
            with open(os.path.join(directory, name), encoding="utf-8") as file:
                texts[name[:-3]] = file.read()
    modules = {PACKAGE if name == "__init__" else PACKAGE + "." + name: text for name, text in texts.items() if name != "agent"}
    packed = zlib.compress("{}\nserve({!r}, i)\n".format(texts["agent"], modules).encode())
    return b"%08d" % len(packed) + packed


# -- messages ------------------------------------------------------------------------------------------------------------


def frames(header: "dict[str, Any]", values: "list[Any]") -> "Iterator[bytes]":
    """Yield the frames of the message that consists of `header` and `values`.

    Each value is bytes, or an object that can be written as JSON. `header` must have the key `id`, which tells the message apart
    from other messages on the stream. The function adds the key `values` to `header`.
    """
    body = memoryview(b"".join(value for value in values if isinstance(value, bytes)))
    while len(body) > PART:
        yield _frame({"id": header["id"], "part": True}, body[:PART])
        body = body[PART:]
    header["values"] = [{"bytes": len(value)} if isinstance(value, bytes) else [value] for value in values]
    yield _frame(header, body)


def _frame(header: "dict[str, Any]", body: memoryview) -> bytes:
    """Return the bytes of one frame: the two lengths, the header as JSON, and the body."""
    text = json.dumps(header).encode()
    return b"".join((_LENGTHS.pack(len(text), len(body)), text, body))


def messages(read: "Callable[[int], bytes]") -> "Iterator[tuple[dict[str, Any], list[Any]]]":
    """Yield the header and the values of each message until the stream ends.

    `read(count)` returns the next `count` bytes of the stream, or fewer bytes at its end. The yielded header is that of the
    message's last frame. Each value is a JSON value, which this header contains, or bytes, which the bodies of the message's
    frames contain. An incomplete message at the end is dropped.
    """
    parts = {}  # type: dict[int, bytearray]
    while True:
        lengths = read(_LENGTHS.size)
        if len(lengths) < _LENGTHS.size:
            return
        size, body_size = _LENGTHS.unpack(lengths)
        text, body = read(size), read(body_size)
        if len(text) + len(body) < size + body_size:
            return
        header = json.loads(text.decode())
        if "part" in header:
            parts.setdefault(header["id"], bytearray()).extend(body)
            continue
        if header["id"] in parts:
            body = bytes(parts.pop(header["id"]) + body)
        values, start = [], 0
        for value in header["values"]:
            if isinstance(value, list):
                values.append(value[0])
            else:
                values.append(body[start : start + value["bytes"]])
                start += value["bytes"]
        yield header, values


class Sender:
    """Sends messages over one stream. Several threads can use the object at the same time.

    A message is cut into frames. Threads take turns after each frame, so that a large message does not delay other messages for
    long.

    Args:
        write: a function that sends all bytes of the argument, like `socket.sendall`.
        broken: a function without parameters, which is called if `write` raises an exception. A part of a frame may then have
            been sent, so that the receiver cannot read later frames.
    """

    def __init__(self, write: "Callable[[bytes], object]", broken: "Callable[[], object]") -> None:
        self._write, self._broken = write, broken
        self._lock, self._next = threading.Lock(), threading.Lock()

    def send(self, header: "dict[str, Any]", values: "list[Any]") -> None:
        """Send the message that consists of `header` and `values` (see `frames`); blocks until the whole message is sent.

        If the sender's function `write` raises OSError or EOFError, the method calls the sender's function `broken` and returns.
        If `write` raises another exception, the method calls `broken` and raises the exception again.
        """
        for frame in frames(header, values):
            with self._next:  # With one lock alone, a thread that sends many frames would keep the others out.
                self._lock.acquire()
            try:
                self._write(frame)
            except (OSError, EOFError):
                return self._broken()  # type: ignore[return-value]
            except BaseException:
                self._broken()
                raise
            finally:
                self._lock.release()


# -- on the edge node ----------------------------------------------------------------------------------------------------


class _Modules:
    """Import hook that loads the modules of this package from `texts`, the source texts by full module name."""

    def __init__(self, texts: "dict[str, str]") -> None:
        self._texts = texts

    def find_spec(self, name: str, path: object = None, target: object = None) -> "ModuleSpec | None":  # noqa: ARG002
        return ModuleSpec(name, self, is_package=name == PACKAGE) if name in self._texts else None  # type: ignore[arg-type]

    def create_module(self, spec: object) -> None:  # noqa: ARG002
        return None

    def exec_module(self, module: "ModuleType") -> None:
        exec(compile(self._texts[module.__name__], module.__name__, "exec"), module.__dict__)


def serve(texts: "dict[str, str]", stdin: "Any") -> None:
    """Answer the client's messages on the binary file `stdin`; at the end of `stdin`, kill all commands and end this process.

    A message contains an `id` that the client chooses, the name of a function of this package, and the function's arguments.
    `serve` calls the function in a new thread, and writes the result or the error to standard output. Some functions, such as
    `processes.run`, start a command; a later message with the same `id` that asks to cancel kills this command.

    `texts` are the source texts of the other modules of this package, by full module name. `serve` imports the modules from these
    texts, because the edge node has no files of this package. The program that the client sends (see `program`) calls `serve`.
    """
    sys.meta_path.insert(0, _Modules(texts))
    with open("/proc/self/environ", "rb") as file:
        if b"\0LC_CTYPE=" not in b"\0" + file.read():
            os.environ.pop("LC_CTYPE", None)  # Python itself has set it (PEP 538), and commands must not see it.
    output = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, lambda *_: sys.exit(1))
    sender = Sender(lambda data: _write_all(output, data), lambda: None)
    processes = importlib.import_module(PACKAGE + ".processes")
    try:
        for header, values in messages(stdin.read):
            if "cancel" in header:
                processes.end(str(header["id"]))
            else:
                threading.Thread(target=_answer, args=(sender, header, values), name=str(header["id"]), daemon=True).start()
    finally:
        os.dup2(nothing, output)  # The client learns that the agent ended, not how its commands then ended.
        processes.end_all()
        os._exit(0)


def _write_all(fd: int, data: bytes) -> None:
    """Write all bytes of `data` to the file descriptor `fd`."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _answer(sender: Sender, header: "dict[str, Any]", values: "list[Any]") -> None:
    """Call the function that a message names, with the message's `values` as arguments, and send the result or the error.

    `header` is the header of the message. Its key `call` is the name of the function, such as "files.read".
    """
    reply = {"id": header["id"]}
    try:
        module, function = header["call"].split(".")
        # Python 3.6 in the C locale encodes file names as ASCII.
        values = [os.fsdecode(v.encode("utf-8", "surrogateescape")) if isinstance(v, str) else v for v in values]
        result = getattr(importlib.import_module(PACKAGE + "." + module), function)(*values)
        reply["tuple"] = isinstance(result, tuple)
        values = list(result) if isinstance(result, tuple) else [result]
    except OSError as error:
        reply["errno"], values = error.errno, [error.strerror or str(error), error.filename and os.fsdecode(error.filename)]
    except BaseException as error:  # noqa: BLE001
        reply["failure"], values = type(error).__name__, [str(error)]
    sender.send(reply, values)
