"""Runs commands below a runtime's loop, forked from a preload process or not: `preload_runner.py PACKAGE` with JSON on stdin.

A script of its own, so that any Python can run it: the runtime's package is imported from its directory `PACKAGE`.
"""

import json
import os
import subprocess
import sys
import types

package = types.ModuleType("dagster_rayslurm")
package.__path__ = [sys.argv[1]]  # type: ignore[attr-defined]
sys.modules["dagster_rayslurm"] = package

from dagster_rayslurm.runtime.payload import preload_server  # noqa: E402
from dagster_rayslurm.runtime.process import processes  # noqa: E402
from dagster_rayslurm.runtime.process.loop import Loop  # noqa: E402


class Command:
    """One command, from its start to its end."""

    def __init__(self, loop, order, number, pool):
        self.loop, self.order = loop, order["commands"][number]
        self.cwd = os.path.join(order["directory"], "work%d" % number)
        os.makedirs(self.cwd)
        for name in self.order.get("links", []):
            os.symlink(name, os.path.join(self.cwd, os.path.basename(name)))
        self.said = {"out": b"", "err": b""}
        self.open = 2
        self.result = {}
        env = dict(order["env"], **self.order.get("env", {}))
        secrets = self.order.get("secrets", {})
        pipes = [os.pipe(), os.pipe()]
        options = {"cwd": self.cwd, "env": dict(env, **secrets)}
        streams = pipes[0][1], pipes[1][1]
        argv = [sys.executable if word == "python" else word for word in self.order["argv"]]
        before = loop.now()

        def begin(forked):
            took, pid = loop.now() - before, forked
            if not isinstance(forked, int):
                options.update(stdin=subprocess.DEVNULL, stdout=streams[0], stderr=streams[1])
                pid = loop.spawn(argv, self.ended, preexec_fn=processes.die_with_parent(), **options)
            why = forked if isinstance(forked, str) else None
            self.result.update(pid=pid, why=why, took=took, known=pid in loop.children())
            self.begun(loop, pool, pipes, pid)

        if order["modules"]:
            forking = pool.fork(order["modules"], argv, self.ended, begin, secrets=secrets, streams=streams, **options)
            if isinstance(forking, str):
                begin(forking)
        else:
            begin(None)

    def begun(self, loop, pool, pipes, pid):
        for number, name in enumerate(("out", "err")):
            reader = pipes[number][0]
            os.close(pipes[number][1])
            loop.on_readable(reader, lambda reader=reader, name=name: self.copy(reader, name))
        for delay, what, signum in self.order.get("signals", []):
            target = pool.pids()[0] if what == "preload" else pid
            loop.call_later(delay, lambda target=target, signum=signum: processes.signal_group(target, signum))
        if self.order.get("orphans"):
            loop.call_later(self.order["orphans"], lambda: processes.StrayProcesses(loop).end(""))

    def copy(self, fd, name):
        data = os.read(fd, 65536)
        self.said[name] += data
        if not data:
            self.loop.forget(fd)
            os.close(fd)
            self.open -= 1
            self.finish()

    def ended(self, code, usage):
        self.result.update(code=code, cpu=usage.ru_utime + usage.ru_stime, maxrss=usage.ru_maxrss)
        self.finish()

    def finish(self):
        if self.open == 0 and "code" in self.result:
            self.result.update({name: text.decode("utf-8", "backslashreplace") for name, text in self.said.items()})
            self.loop.call_later(self.order.get("pause", 0), self.loop.stop)


def main(order):
    """Run the commands, one after another or all at once."""
    processes.become_subreaper()
    loop = Loop()
    os.environ.clear()
    os.environ.update(order["env"])
    pool = preload_server.PreloadServer(loop, os.path.join(order["directory"], "preload"))
    stall = [loop.now(), 0.0]

    def tick():
        stall[:] = loop.now(), max(stall[1], loop.now() - stall[0])
        loop.call_later(0.02, tick)

    tick()
    commands = []
    for number in range(len(order["commands"])):
        commands.append(Command(loop, order, number, pool))
        if not order.get("at_once"):
            loop.run()
            loop._stopping = False
    while any("out" not in command.result for command in commands):
        loop.run()
        loop._stopping = False
    processes_left, signalled = len(pool.pids()), []
    real = processes.signal_group
    processes.signal_group = lambda pid, signum: signalled.append(pid) or real(pid, signum)
    pool.close()
    processes.signal_group = real
    left = processes.kill_descendants(os.getpid(), loop.reap)
    print(
        json.dumps(
            {
                "preload_processes": processes_left,
                "left": left,
                "stall": stall[1],
                "signalled": signalled,
                "results": [command.result for command in commands],
            }
        )
    )


main(json.load(sys.stdin))
