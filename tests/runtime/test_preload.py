"""Payloads forked from an interpreter that has imported modules: no script can tell it from a fresh one."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dagster_rayslurm
from dagster_rayslurm.runtime.payload.preload_child import (
    changed_file,
    fork_problem,
    printed_since,
    shadowed_module,
)
from dagster_rayslurm.runtime.payload.preload_server import (
    affects_imports,
    command_problem,
    environment_problem,
    preload_environment,
)

from ..conftest import MARK

PACKAGE = Path(dagster_rayslurm.__file__).parent
PYTHON = os.environ.get("PRELOAD_TEST_PYTHON", sys.executable)
"""Any Python from 3.8 on may stand here, to see whether its ways are met."""

SCRIPTS: dict[str, str] = {
    "look": """
        import builtins, gc, locale, os, resource, signal, sys, threading, time, warnings
        print(sys.argv, sys.path, sys.executable, getattr(sys, "orig_argv", None), sys.flags, sys.warnoptions)
        print(sorted(globals()), __file__, __doc__, __spec__, __package__, __name__, __builtins__ is builtins)
        print(type(__loader__).__name__, __loader__.path, __loader__.name, __loader__.get_filename("__main__"))
        main = sys.modules["__main__"]
        print(main.__dict__ is globals(), repr(main), type(main))
        print(os.getcwd(), dict(os.environ), repr(sys.stdin.read()), sys.stdin, sys.stdout, sys.stderr)
        for stream in (sys.stdin, sys.stdout, sys.stderr, sys.__stdout__):
            print(stream.encoding, stream.errors, stream.line_buffering, stream.write_through, stream.seekable(),
                  stream.fileno(), type(stream.buffer), stream.name, stream.isatty())
        print([signal.getsignal(n) for n in range(1, 32)], signal.pthread_sigmask(signal.SIG_BLOCK, []))
        print([line for line in open("/proc/self/status") if line[:4] in ("SigB", "SigI", "SigC", "ShdP", "Umas", "Thre")])
        print(os.getpgrp() == os.getpid() == os.getsid(0), sorted(os.listdir("/proc/self/fd")), os.umask(0), os.nice(0))
        print(threading.enumerate()[0].name, threading.current_thread() is threading.main_thread(), threading.active_count(),
              threading.get_ident() == threading.main_thread().ident)
        print(gc.isenabled(), gc.get_threshold(), sys.getrecursionlimit(), warnings.filters, time.tzname, locale.getlocale(),
              locale.setlocale(locale.LC_ALL), resource.getrlimit(resource.RLIMIT_NOFILE), sys.dont_write_bytecode)
        import ctypes
        death = ctypes.c_int()
        ctypes.CDLL(None).prctl(2, ctypes.byref(death), 0, 0, 0)
        print(death.value, sys.gettrace(), sys.getprofile(), sys.excepthook is sys.__excepthook__, os.times()[4] > 0)
        print(eval("3 / 2"), [k for k in sys.modules if k == "__main__"])
    """,
    "plain": "pass",
    "empty": "",
    "docstring": '"""A docstring."""\nprint(__doc__, globals().get("__annotations__"))\nx: int = 1\nprint(__annotations__)',
    "exit-3": "import sys; sys.exit(3)",
    "exit-text": "import sys; sys.exit('no luck: \\u00e9')",
    "os-exit": "import os; print('not flushed?', end=''); os._exit(4)",
    "error": "def f(n):\n    return 1 / n\n\nf(0)",
    "chain": "try:\n    {}['a']\nexcept KeyError as error:\n    raise ValueError('two\\nlines') from error",
    "context": "try:\n    {}['a']\nexcept KeyError:\n    raise RuntimeError('during')",
    "recursion": "import sys\nsys.setrecursionlimit(60)\ndef f(): f()\nf()",
    "interrupt": "import atexit; atexit.register(print, 'at exit')\nraise KeyboardInterrupt",
    "interrupt-signal": "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(5)",
    "terminated": "import os, signal, atexit; atexit.register(print, 'never')\nos.kill(os.getpid(), signal.SIGTERM)",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "syntax": "print('never')\nx = = 1\n",
    "hook": "import sys\nsys.excepthook = lambda *told: print('hook', told[:2], told[2].tb_frame.f_code.co_name)\n1 / 0",
    "hook-exits": "import sys\ndef hook(*_): raise SystemExit(9)\nsys.excepthook = hook\n1 / 0",
    "thread-error": "import threading\nt = threading.Thread(target=lambda: 1 / 0, name='T')\nt.start(); t.join()",
    "end": """
        import atexit, threading, time, weakref
        class Gone:
            def __init__(self, name): self.name = name
            def __del__(self): print("del", self.name)
        kept, weak = Gone("kept"), Gone("weak")
        weakref.finalize(weak, print, "finalize")
        atexit.register(print, "first registered")
        atexit.register(lambda: print("second registered", threading.active_count()))
        threading.Thread(target=lambda: (time.sleep(0.1), print("thread ends"))).start()
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        print("main ends")
    """,
    "atexit-error": "import atexit\natexit.register(lambda: 1 / 0)\natexit.register(print, 'before')",
    "atexit-exit": "import atexit, sys\natexit.register(lambda: sys.exit(5))",
    "closed": "import sys\nsys.stdout.close()",
    "broken-flush": """
        import sys
        class Stream:
            def write(self, text): pass
            def flush(self): raise OSError("flush")
        sys.stdout = Stream()
    """,
    "latin": "# -*- coding: latin-1 -*-\nprint(ascii('é'))",
    "bom": "\ufeffprint('bom')",
    "unicode": "import sys\nprint('é€😀')\nprint('ü', file=sys.stderr)\nsys.stdout.buffer.write(b'\\xff')\nprint('\\udcff')",
    "order": """
        import os, sys
        for number in range(3):
            print("out", number, end=" ")
            os.write(1, b"raw ")
            print("err", number, file=sys.stderr)
    """,
    "pickle": """
        import pickle, pickletools
        class Own: pass
        def own(): return 1
        print(Own.__module__, own.__module__, pickle.dumps(own), pickle.loads(pickle.dumps(Own)) is Own, repr(Own))
        try:
            import cloudpickle
            print(cloudpickle.loads(cloudpickle.dumps(own))(), b"own" in cloudpickle.dumps(own))
        except ImportError:
            pass
    """,
    "source": """
        import inspect, linecache
        def own():
            return 1
        print(inspect.getsource(own), inspect.getfile(own), linecache.getline(__file__, 2))
    """,
    "spawn": """
        import multiprocessing, os, sys
        def double(value): return 2 * value, __name__, os.path.basename(sys.argv[0]), multiprocessing.current_process().name
        if __name__ == "__main__":
            for method in ("spawn", "fork", "forkserver"):
                with multiprocessing.get_context(method).Pool(1) as pool:
                    print(method, pool.map(double, [1, 2]))
            print(multiprocessing.current_process().name, multiprocessing.parent_process())
    """,
    "children": """
        import os, subprocess, sys
        code = "import os, sys; print(sys.argv, os.getcwd(), sys.stdin.read(), sorted(os.listdir('/proc/self/fd')))"
        print(subprocess.run([sys.executable, "-c", code, "x"], stdout=subprocess.PIPE, text=True).stdout)
        print(subprocess.run("umask; echo $FOO; ulimit -n", shell=True, stdout=subprocess.PIPE, text=True).stdout)
        pid = os.fork()
        if pid == 0:
            sys.exit(6)
        print(os.waitpid(pid, 0)[1])
    """,
    "import-main": "import __main__\nvalue = 3\nprint(__main__.value, __main__.__file__)",
    "beside": "import helper_beside, sys\nprint(helper_beside.__file__)",
    "globals-at-exit": "import atexit\nname = 'still here'\natexit.register(lambda: print(name))",
}

EXTRA: dict[str, list[str]] = {
    "module": ["python", "-m", "mod_here", "a", "-b", ""],
    "module-error": ["python", "-m", "pack.fails"],
    "module-package": ["python", "-m", "pack"],
    "module-nothing": ["python", "-m", "pack.nothing"],
    "module-missing": ["python", "-m", "no_such_module"],
    "module-stdlib": ["python", "-m", "json.tool", "--help"],
    "relative": ["python", "linked.py", "x"],
    "directory": ["python", "app"],
    "archive": ["python", "app.zip", "y"],
}


def layout(directory: Path) -> list[str]:
    """Files that the commands find; the entries that each working directory links to."""
    scripts, here = directory / "scripts", directory / "here"
    (here / "pack").mkdir(parents=True)
    (here / "app").mkdir()
    scripts.mkdir()
    (scripts / "helper_beside.py").write_text("")
    for name, text in SCRIPTS.items():
        encoding = "latin-1" if name == "latin" else "utf-8"
        (scripts / f"case-{name}.py").write_bytes(textwrap.dedent(text).lstrip("\n").encode(encoding))
    look = textwrap.dedent(SCRIPTS["look"]).lstrip().replace("__loader__.path, ", "")
    (here / "linked.py").write_text(look)
    (here / "mod_here.py").write_text(look + "\nprint(__spec__.name, __cached__ is None)\n")
    (here / "pack" / "__init__.py").write_text("import sys\nprint('parent', sys.argv)\n")
    (here / "pack" / "__main__.py").write_text("import sys\nprint(sys.argv, __package__, sys.path[0])\n")
    (here / "pack" / "fails.py").write_text("def f():\n    raise ValueError('x')\n\nf()\n")
    main = "import sys\nprint(sys.argv, sys.path[0], __spec__.name, sorted(globals()))\n1 / 0\n"
    (here / "app" / "__main__.py").write_text(main)
    with zipfile.ZipFile(here / "app.zip", "w") as archive:
        archive.writestr("__main__.py", main)
    return [str(path) for path in sorted(here.iterdir())]


def run(directory: Path, commands: list[dict[str, Any]], modules: list[str], **order: Any) -> dict[str, Any]:
    """What the runner makes of some commands."""
    directory.mkdir(exist_ok=True)
    env = {"PATH": os.environ["PATH"], "HOME": str(directory), "LANG": "C.UTF-8", "PYTHONUNBUFFERED": "1", "FOO": "bar"}
    env[MARK] = os.environ[MARK]
    env.update(order.pop("env", {}))
    order.update(commands=commands, modules=modules, directory=str(directory), env=env)
    runner = [PYTHON, "-B", str(Path(__file__).with_name("preload_runner.py")), str(PACKAGE)]
    done = subprocess.run(runner, input=json.dumps(order), capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert result["left"] == []
    return result | {"said": done.stderr}


@pytest.fixture(scope="module")
def both_ways(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """The results of all commands by name, in fresh interpreters and in forked ones."""
    directory = tmp_path_factory.mktemp("parity")
    links = layout(directory)
    names = {name: ["python", str(directory / "scripts" / f"case-{name}.py"), "a b", ""] for name in SCRIPTS} | EXTRA
    env = {"FOO": "b\u00e4r\n", "ODD": "x=\udcff"}
    commands = [{"argv": argv, "links": links, "env": env} for argv in names.values()]
    os.environ[MARK] = "parity"
    told = []
    for modules in ([], ["multiprocessing", "pickle", "inspect", "random"]):
        place = directory / ("forked" if modules else "fresh!")
        told.append(dict(zip(names, run(place, commands, modules)["results"], strict=True)))
    return told[0], told[1]


OWN_FRAME = r'  File "[^"]*/preload/\w+\.py", line \d+, in .*\n(?:    .*\n)*'
"""A frame of the preload process in a traceback: that of an interrupt has some."""


@pytest.mark.parametrize("name", [*SCRIPTS, *EXTRA])
def test_nothing_differs(both_ways: tuple[dict[str, Any], dict[str, Any]], name: str) -> None:
    fresh, forked = (results[name] for results in both_ways)
    assert forked["why"] is None and forked["known"]
    for part in ("out", "err", "code"):
        expected, found = (
            re.sub(OWN_FRAME + r"|forked|fresh!|0x[0-9a-f]+|\d+ more times", "", str(result[part])) for result in (fresh, forked)
        )
        assert found == expected
    assert forked["code"] != 0 or name != "error"


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], str]:
    (tmp_path / "payloads").mkdir()

    def write(name: str, text: str) -> str:
        path = tmp_path / "payloads" / name
        path.write_text(textwrap.dedent(text))
        return str(path)

    return write


Write = Callable[[str, str], str]


def test_random_streams_differ(write: Write, tmp_path: Path) -> None:
    pytest.importorskip("numpy")
    if sys.executable != PYTHON:
        pytest.skip("numpy is there for one Python")
    script = write(
        "a.py", "import random, numpy, uuid, os\nprint(random.random(), numpy.random.rand(), uuid.uuid4(), os.urandom(4).hex())"
    )
    results = run(tmp_path / "r", [{"argv": ["python", script]}] * 3, ["numpy", "random"], env={"PYTHONPATH": _site()})["results"]
    assert all(result["why"] is None for result in results)
    for values in zip(*(result["out"].split() for result in results), strict=True):
        assert len(set(values)) == 3


def _site() -> str:
    """Where this Python's packages are, for one that is not in their environment."""
    import numpy

    return str(Path(numpy.__file__).parent.parent)


def test_several_at_once_on_their_own(write: Write, tmp_path: Path) -> None:
    script = write("a.py", "import os, sys, time\ntime.sleep(0.3)\nprint(os.environ['WHO'], sys.argv[1], os.getcwd()[-5:])")
    commands = [{"argv": ["python", script, str(n)], "env": {"WHO": f"w{n}"}} for n in range(4)]
    told = run(tmp_path / "r", commands, ["json"], at_once=True)
    assert [result["out"] for result in told["results"]] == [f"w{n} {n} work{n}\n" for n in range(4)]
    assert told["preload_processes"] == 1 and all(result["why"] is None for result in told["results"])


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_group_ends_it_alone(write: Write, tmp_path: Path, signum: int) -> None:
    waits = write("waits.py", "import subprocess, time\nsubprocess.Popen(['sleep', '20'])\nprint('up')\ntime.sleep(20)")
    other = write("other.py", "import time\ntime.sleep(1)\nprint('on')")
    commands = [{"argv": ["python", waits], "signals": [[0.4, "payload", signum]]}, {"argv": ["python", other]}]
    told = run(tmp_path / "r", commands, ["json"], at_once=True)
    first, second = told["results"]
    assert (first["code"], first["out"]) == (-signum, "up\n") and second["out"] == "on\n" and told["preload_processes"] == 1


def test_a_handler_gets_its_signal(write: Write, tmp_path: Path) -> None:
    script = write("a.py", "import signal, sys, time\nsignal.signal(15, lambda *_: sys.exit(4))\nprint('up')\ntime.sleep(20)")
    told = run(tmp_path / "r", [{"argv": ["python", script], "signals": [[0.5, "payload", 15]]}], ["json"])
    assert (told["results"][0]["code"], told["results"][0]["out"]) == (4, "up\n")


def test_payloads_outlive_their_preload_process(write: Write, tmp_path: Path) -> None:
    """Killed with a payload running, it is replaced for those that follow."""
    script = write("a.py", "import sys, time\ntime.sleep(1)\nprint('whole')\nsys.exit(5)")
    command = {"argv": ["python", script]}
    told = run(tmp_path / "r", [{**command, "signals": [[0.3, "preload", 9]]}, command, command], ["json"])
    for result in told["results"]:
        assert (result["code"], result["out"], result["why"], result["known"]) == (5, "whole\n", None, True)
        assert result["cpu"] < 0.5
    assert told["preload_processes"] == 1


def test_a_preload_process_that_hangs_is_replaced(write: Write, tmp_path: Path) -> None:
    script = write("a.py", "import os, time\ntime.sleep(0.5)\nprint('whole')")
    command = {"argv": ["python", script]}
    told = run(tmp_path / "r", [{**command, "signals": [[0.2, "preload", signal.SIGSTOP]]}, command, command], ["json"])
    first, second, third = told["results"]
    assert [result["out"] for result in told["results"]] == ["whole\n"] * 3
    assert first["why"] is None and second["why"] == "the preloaded one does not answer" and third["why"] is None
    assert second["took"] > 0.9 and told["stall"] < 0.8 * second["took"]


def test_imports_that_take_long_are_not_waited_for(write: Write, tmp_path: Path) -> None:
    write("slow_to_import.py", "import time\ntime.sleep(2.2)")
    script = tmp_path / "a.py"
    script.write_text("import sys, time\nprint('slow_to_import' in sys.modules)\ntime.sleep(1.0)")
    env = {"PYTHONPATH": str(tmp_path / "payloads")}
    told = run(tmp_path / "r", [{"argv": ["python", str(script)]}] * 2, ["slow_to_import"], env=env)
    first, second = told["results"]
    assert first["why"] == "importing slow_to_import is not done yet" and first["out"] == "False\n"
    assert told["stall"] < 2.0
    assert second["why"] is None and second["out"] == "True\n"


REFUSED = {
    "nothing_here_": (None, r"nothing_here_ cannot be imported: ModuleNotFoundError: No module named 'nothing_here_'"),
    "leaves": ("import sys\nsys.exit('no GPU here')", r"leaves cannot be imported: SystemExit: no GPU here"),
    "threads": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), name='poller', daemon=True).start()",
        r"importing them started the thread 'poller', which no forked process has",
    ),
    "native": (
        "import _thread, time\n_thread.start_new_thread(time.sleep, (60,))\ntime.sleep(0.1)",
        r"importing them started (1 threads|the thread .*), which no forked process has",
    ),
    "dies": ("import os\nos._exit(3)", r"the process that imports dies ended"),
}


@pytest.mark.parametrize("module", REFUSED)
def test_what_cannot_be_forked_from_says_why(write: Write, tmp_path: Path, module: str) -> None:
    text, why = REFUSED[module]
    if text is not None:
        write(f"{module}.py", text)
    script = tmp_path / "a.py"
    script.write_text("print('ran')")
    env = {"PYTHONPATH": str(tmp_path / "payloads")}
    told = run(tmp_path / "r", [{"argv": ["python", str(script)]}] * 2, [module], env=env)
    for result in told["results"]:
        assert re.fullmatch(why, result["why"]), result["why"]
        assert (result["out"], result["code"]) == ("ran\n", 0)


def test_a_changed_module_is_imported_anew(write: Write, tmp_path: Path) -> None:
    module = write("mine.py", "value = 1")
    script = tmp_path / "a.py"
    script.write_text(f"import mine\nprint(mine.value)\nopen({module!r}, 'w').write('value = 22')")
    env = {"PYTHONPATH": str(tmp_path / "payloads")}
    told = run(tmp_path / "r", [{"argv": ["python", str(script)]}] * 3, ["mine"], env=env)
    first, second, third = told["results"]
    assert [result["out"] for result in told["results"]] == ["1\n", "22\n", "22\n"]
    assert first["why"] is None and second["why"] == f"{module} changed since it was imported"
    assert told["preload_processes"] == 1 and (third["why"] is None or third["why"].endswith("changed since it was imported"))


def test_modules_beside_the_script_come_first(write: Write, tmp_path: Path) -> None:
    write("fractions.py", "value = 'own'")
    script = write("a.py", "import fractions\nprint(fractions.value)")
    (told,) = run(tmp_path / "r", [{"argv": ["python", script]}], ["fractions"])["results"]
    assert told["out"] == "own\n" and "has a module 'fractions' of its own" in told["why"]


def test_variables_that_act_at_import(write: Write, tmp_path: Path) -> None:
    script = write("a.py", "import os\nprint(os.environ.get('OMP_NUM_THREADS'))")
    commands = [{"argv": ["python", script]}, {"argv": ["python", script], "env": {"OMP_NUM_THREADS": "3"}}]
    first, second = run(tmp_path / "r", commands, ["json"])["results"]
    assert first["why"] is None and (second["out"], second["code"]) == ("3\n", 0)
    assert second["why"] == "OMP_NUM_THREADS may matter when modules are imported and differs"


def test_secrets_stay_with_their_payload(write: Write, tmp_path: Path) -> None:
    script = write(
        "a.py",
        """
        import os
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                if b"s3cr3t" in open(f"/proc/{pid}/environ", "rb").read():
                    found.append(pid)
            except OSError:
                pass
        print(os.environ.get("RAY_SECRET"), os.environ.get("API_KEY"), found)
        """,
    )
    secrets = {"API_KEY": "s3cr3t", "HF_TOKEN": "s3cr3t"}
    commands: list[dict[str, Any]] = [{"argv": ["python", script], "secrets": secrets}, {"argv": ["python", script]}]
    first, second = run(tmp_path / "r", commands, ["json"])["results"]
    assert first["why"] is None and first["out"] == "None s3cr3t []\n"
    assert second["out"] == "None None []\n"


def test_a_forked_payload_is_no_orphan(write: Write, tmp_path: Path) -> None:
    script = write("a.py", "import time\ntime.sleep(0.5)\nprint('done')")
    (told,) = run(tmp_path / "r", [{"argv": ["python", script], "orphans": 0.3}], ["json"])["results"]
    assert (told["code"], told["out"]) == (0, "done\n")


def test_relative_entries_of_the_search_path(write: Write, tmp_path: Path) -> None:
    script = write("a.py", "import sys\nprint(sys.path[1:4])")
    env = {"PYTHONPATH": "lib::/absolute"}
    forked = run(tmp_path / "r", [{"argv": ["python", script]}], ["json"], env=env)["results"][0]
    fresh = run(tmp_path / "f", [{"argv": ["python", script]}], [], env=env)["results"][0]
    assert forked["why"] is None and forked["out"] == fresh["out"].replace("/f/", "/r/")


def test_a_directory_that_was_not_there_is_found(write: Write, tmp_path: Path) -> None:
    late = tmp_path / "late"
    code = f"import os\nos.mkdir({str(late)!r})\nopen({str(late / 'came_late.py')!r}, 'w').write('value = 4')"
    script = write("a.py", "import came_late\nprint(came_late.value)")
    commands = [{"argv": ["python", write("first.py", code)]}, {"argv": ["python", script]}]
    told = run(tmp_path / "r", commands, ["json"], env={"PYTHONPATH": str(late)})["results"]
    assert [(result["why"], result["out"], result["err"]) for result in told] == [(None, "", ""), (None, "4\n", "")]


def test_a_preload_process_that_is_gone_is_not_signalled(write: Write, tmp_path: Path) -> None:
    """Its process id may be another one's by then."""
    write("leaves.py", "import sys\nsys.exit('no GPU here')")
    script = tmp_path / "a.py"
    script.write_text("import time\ntime.sleep(0.3)")
    env = {"PYTHONPATH": str(tmp_path / "payloads")}
    told = run(tmp_path / "r", [{"argv": ["python", str(script)]}], ["leaves"], env=env)
    assert told["results"][0]["why"].startswith("leaves cannot be imported") and told["preload_processes"] == 0
    assert told["signalled"] == []


def test_a_missing_script_fails_as_ever(tmp_path: Path) -> None:
    (told,) = run(tmp_path / "r", [{"argv": ["python", "/no/such/script.py"]}], ["json"])["results"]
    assert told["why"] == "the script /no/such/script.py cannot be read" and told["code"] == 2 and "No such file" in told["err"]


def test_what_imports_print_belongs_to_no_payload(write: Write, tmp_path: Path) -> None:
    write("chatty.py", "print('hello from the import')")
    script = tmp_path / "a.py"
    script.write_text("print('own')")
    told = run(tmp_path / "r", [{"argv": ["python", str(script)]}], ["chatty"], env={"PYTHONPATH": str(tmp_path / "payloads")})
    assert told["results"][0]["out"] == "own\n" and told["results"][0]["why"] is None
    assert "hello from the import" in told["said"]


@pytest.mark.parametrize(
    ("argv", "forked"),
    [
        (["python", "a.py"], True),
        (["python3", "a", "-x"], True),
        (["/env/bin/python", "-m", "mod", "x"], True),
        (["python", "-m"], False),
        (["python"], False),
        (["python", "-"], False),
        (["python", "-u", "a.py"], False),
        (["python", "-c", "pass"], False),
        (["python", "-mmod"], False),
        (["python", "a.pyc"], False),
        (["python3.11", "a.py"], False),
        (["bash", "a.sh"], False),
        ([], False),
    ],
)
def test_commands_that_can_be_forked(argv: list[str], forked: bool) -> None:
    assert (command_problem(argv, "/env/bin/python") is None) == forked


def test_which_variables_matter() -> None:
    matter = ["PYTHONHASHSEED", "LD_PRELOAD", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "RAY_AUTH_MODE", "TORCH_HOME", "HOME"]
    do_not = ["PATH", "FOO", "RAYSLURM_RUN_DIR", "RAY_ADDRESS", "RAY_JOB_CONFIG_JSON_ENV_VAR", "HF_TOKEN", "SLURM_JOB_ID"]
    assert all(map(affects_imports, matter)) and not any(map(affects_imports, do_not))
    preloaded = {"PATH": "/a", "OMP_NUM_THREADS": "1", "TZ": "UTC"}
    assert environment_problem(preloaded, {"PATH": "/b", "OMP_NUM_THREADS": "1", "TZ": "UTC", "MORE": "x"}) is None
    problem = environment_problem(preloaded, {"OMP_NUM_THREADS": "1", "LC_ALL": "C"})
    assert problem == "LC_ALL, TZ may matter when modules are imported and differ"


def test_a_preload_process_has_nothing_of_one_payload() -> None:
    base = {"KEPT": "1", "OMP_NUM_THREADS": "1", "TZ": "UTC"}
    payload = {"OWN": "2", "OMP_NUM_THREADS": "2", "HF_HOME": "/h", "RAY_SECRET": "s", "RAYSLURM_RUN_DIR": "/r"}
    assert preload_environment(base, payload, {"RAY_SECRET"}) == {"KEPT": "1", "OMP_NUM_THREADS": "2", "HF_HOME": "/h"}


BLAS = "/env/lib/libscipy_openblas64_-1.so"


@pytest.mark.parametrize(
    ("python", "native", "libraries", "opened", "why"),
    [
        ([], [], [], [], None),
        ([], [""] * 3, [BLAS], [], None),
        ([], [""] * 3, ["/env/lib/libiomp5.so"], [], None),
        ([], [""] * 4, [BLAS], [], "4 threads"),
        ([], [""] * 6, [BLAS, "/b/libopenblas.so.0"], [], None),
        ([], [""] * 3, ["/usr/lib/openblas-pthread/libblas.so.3"], [], None),
        ([], ["jemalloc_bg_thd", ""], [BLAS], [], None),
        ([], [""], ["/env/lib/libgomp.so.1"], [], "1 threads"),
        ([], ["grpc_poller"], [BLAS], [], "'grpc_poller'"),
        (["tqdm"], [""], [BLAS], [], "'tqdm'"),
        ([], [], [], ["/dev/null", "/dev/nvidia0"], "/dev/nvidia0"),
    ],
)
def test_threads_and_devices_that_matter(
    python: list[str], native: list[str], libraries: list[str], opened: list[str], why: str | None
) -> None:
    problem = fork_problem(python, native, libraries, opened, 4)
    assert problem is None if why is None else why in str(problem)


def test_modules_beside_a_script_shadow_imported_ones(tmp_path: Path) -> None:
    for name in ("alone.py", "fast.cpython-311-x86_64-linux-gnu.so", "notes.txt", "known.py"):
        (tmp_path / name).touch()
    (tmp_path / "pack").mkdir()
    (tmp_path / "namespace").mkdir()
    (tmp_path / "pack" / "__init__.py").touch()
    there = str(tmp_path / "known.py")
    assert shadowed_module(str(tmp_path), {"notes": None, "namespace": None, "other": None, "known": there}) is None
    for name in ("alone", "fast", "pack"):
        assert shadowed_module(str(tmp_path), {name: "/elsewhere"}) == name
    assert shadowed_module(str(tmp_path / "nowhere"), {"alone": None}) is None


def test_files_that_changed(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text("1")
    info = path.stat()
    files = {str(path): (info.st_mtime_ns, info.st_size)}
    assert changed_file(files) is None
    path.write_text("12")
    assert changed_file(files) == str(path)
    path.unlink()
    assert changed_file(files) == str(path)


def test_recent_output_of_workers_is_noticed(tmp_path: Path) -> None:
    logs, marks = str(tmp_path), ":job_id:02000000\n:task_name:square\n"
    (tmp_path / "worker-a-02000000-1.out").write_text(marks)
    (tmp_path / "raylet.out").write_text("tells much\n")
    (tmp_path / "raylet.err").touch()
    old = tmp_path / "worker-b-02000000-2.out"
    old.write_text(marks + "said\n")
    os.utime(old, (1, 1))
    assert not printed_since(logs, 100.0)
    for name in ("worker-c-02000000-3.err", "raylet.err"):
        (tmp_path / name).write_text(marks + "said\n")
        assert printed_since(logs, 100.0)
        (tmp_path / name).unlink()
    (tmp_path / "worker-d-ffffffff-4.out").write_text(marks * 10000)
    assert printed_since(logs, 100.0)
