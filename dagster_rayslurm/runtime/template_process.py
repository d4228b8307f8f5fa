"""One process that has imported modules, and the payloads that are forked from it; the runtime's side of `template`.

Nothing here blocks: a template that hangs must not stop what else the runtime does.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from array import array
from typing import Any, Callable, Dict, List, Optional, Tuple, Union

from . import processes
from .loop import ExitCallback, Loop
from .template import MARK, MARK_ROOM, PAD
from .workspace import Environment

Forked = Union[int, str]
"""The process id of a forked payload, which is its process group too; or why it needs a fresh interpreter, after "because"."""

_PATIENCE = 1.5
"""Seconds that a payload waits for a template in all: for its imports to end, and for its answer. A fresh interpreter takes
about that long."""

_SILENT = "the preloaded one does not answer"


class Template:
    """One process that has imported modules, or still does.

    Args:
        loop: where everything happens.
        script: what it runs.
        python: the environment's Python.
        modules: what it imports.
        env: its environment.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, loop: Loop, script: str, python: str, modules: Tuple[str, ...], env: Environment) -> None:
        self.env = env
        self.ended = False
        """Whether there must be another one; one that cannot serve says so once, and is asked no more."""
        self.running = True
        self.served = False
        """Whether it got as far as to say whether it can serve."""
        self._loop = loop
        self._modules = ", ".join(modules)
        self._ready = False
        self._problem: Optional[str] = None
        self._said = b""
        self._waiting: List[Callable[[Optional[str]], None]] = []
        self._control, other = socket.socketpair()
        self._control.setblocking(False)
        out = os.pipe()
        try:
            self.pid = loop.spawn(
                [python, script, str(other.fileno()), *modules, PAD],
                self._exited,
                cwd=os.path.dirname(script),
                env={**env, MARK: MARK_ROOM},
                stdin=subprocess.DEVNULL,
                stdout=out[1],
                stderr=out[1],
                pass_fds=(other.fileno(),),
                preexec_fn=processes.die_with_parent(),
            )
        except BaseException:
            self._control.close()
            os.close(out[0])
            raise
        finally:
            other.close()
            os.close(out[1])
        loop.on_readable(out[0], lambda: self._pass_on(out[0]))
        loop.on_readable(self._control.fileno(), self._hear)

    @property
    def importing(self) -> str:
        """Why a payload waits for it no longer."""
        return "importing %s is not done yet" % self._modules

    def when_ready(self, call: Callable[[Optional[str]], None]) -> None:
        """Have something called, perhaps at once, when this serves, or with why it does not."""
        if self._ready or self.ended:
            call(self._problem)
        else:
            self._waiting.append(call)

    def _hear(self) -> None:
        """Take in whether it can serve, which it says once, or that it has ended."""
        try:
            data = self._control.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._loop.forget(self._control.fileno())
            return self.end() if self._problem is None else None
        self._said += data
        if not self._ready and self._said.endswith(b"\n"):
            self._problem = json.loads(self._said.decode("ascii"))["problem"]
            self._ready = self.served = True
            self._tell(self._problem)

    def _tell(self, problem: Optional[str]) -> None:
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call(problem)

    def send(self, connection: socket.socket, streams: Tuple[int, int]) -> None:
        """Have a process forked that talks over a connection.

        Raises:
            OSError: it does not listen.
        """
        fds = array("i", [connection.fileno(), *streams])
        self._control.sendmsg([b"f"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])

    def end(self) -> None:
        """End it at once; payloads that were forked from it go on."""
        if not self.ended:
            self.ended = True
            self._loop.forget(self._control.fileno())
            self._control.close()
            if self.running:
                processes.signal_group(self.pid, signal.SIGKILL)
            self._tell("the process that imports %s ended" % self._modules)

    def _exited(self, *_: Any) -> None:
        self.running = False  # From here on its process id may be another one's.
        if self._problem is None:
            self.end()

    def _pass_on(self, fd: int) -> None:
        """Pass on what modules print when they are imported: it belongs to no payload."""
        data = os.read(fd, 65536)
        if data:
            sys.stderr.write(data.decode("utf-8", "replace"))
        else:
            self._loop.forget(fd)
            os.close(fd)


class Fork:
    """A payload on its way: waits until the template is ready, sends the request, and takes the answer.

    Args:
        loop: where everything happens.
        template: what it is forked from.
        request: what the forked process shall become.
        streams: descriptors of its output and errors.
        on_exit: called when it has ended.
        done: called once with what has become of it, unless `cancel` is called before.
    """

    def __init__(
        self,
        loop: Loop,
        template: Template,
        request: Dict[str, Any],
        streams: Tuple[int, int],
        on_exit: ExitCallback,
        done: Callable[[Forked], None],
    ) -> None:
        self._loop = loop
        self._template = template
        self._streams = streams
        self._on_exit = on_exit
        self._done: Optional[Callable[[Forked], None]] = done
        self._connection: Optional[socket.socket] = None
        self._unsent = json.dumps(request).encode("ascii") + b"\n"
        self._answer = b""
        self._timer = loop.call_later(_PATIENCE, self._give_up)
        template.when_ready(self._begin)

    def cancel(self) -> None:
        """Have no payload: a process that nobody tells to go ends by itself."""
        self._done = None
        self._close()

    def _finish(self, forked: Forked) -> None:
        self._close()
        done, self._done = self._done, None
        if done is not None:
            done(forked)

    def _close(self) -> None:
        self._timer.cancel()
        if self._connection is not None:
            self._loop.forget(self._connection.fileno())
            self._connection.close()
            self._connection = None

    def _give_up(self) -> None:
        if self._connection is None:
            return self._finish(self._template.importing)
        self._fail()

    def _fail(self) -> None:
        """Nothing has begun, as nobody said "go"; who does not answer is asked no more."""
        self._template.end()
        self._finish(_SILENT)

    def _begin(self, problem: Optional[str]) -> None:
        if self._done is None:
            return
        if problem is not None:
            return self._finish(problem)
        self._connection, theirs = socket.socketpair()
        self._connection.setblocking(False)
        try:
            with theirs:
                self._template.send(theirs, self._streams)
        except OSError:
            return self._fail()
        self._loop.on_writable(self._connection.fileno(), self._send)

    def _send(self) -> None:
        assert self._connection is not None
        try:
            self._unsent = self._unsent[self._connection.send(self._unsent) :]
        except BlockingIOError:
            return
        except OSError:
            return self._finish(_SILENT)
        if not self._unsent:
            self._loop.forget(self._connection.fileno())
            self._loop.on_readable(self._connection.fileno(), self._receive)

    def _receive(self) -> None:
        assert self._connection is not None
        try:
            data = self._connection.recv(65536)
            self._answer += data
            if not data:  # The forked process has ended, which says nothing about the template.
                return self._finish(_SILENT)
            if not self._answer.endswith(b"\n"):
                return
            answer = json.loads(self._answer.decode("ascii"))
            if answer["problem"] is None:
                self._connection.send(b"go")  # It lives, so nobody has collected it before it is adopted.
        except BlockingIOError:
            return
        except OSError:
            return self._finish(_SILENT)
        if answer["problem"] is not None:
            if answer["stale"]:
                self._template.end()
            return self._finish(str(answer["problem"]))
        self._loop.adopt(answer["pid"], self._on_exit)
        self._finish(int(answer["pid"]))
