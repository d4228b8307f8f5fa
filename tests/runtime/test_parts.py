"""Smaller parts of the runtime: specs, the archive, usage, outputs, environments of payloads."""

from __future__ import annotations

import glob
import json
import os
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from dagster_pipes import decode_param
from hypothesis import given
from hypothesis import strategies as st

from dagster_rayslurm import archive
from dagster_rayslurm.archive import build_runtime, install_runtime, runtime_name
from dagster_rayslurm.runtime.node import usage
from dagster_rayslurm.runtime.node.usage import Attribution
from dagster_rayslurm.runtime.payload import environment
from dagster_rayslurm.runtime.payload.life import Awaited
from dagster_rayslurm.runtime.payload.payload import PayloadProcess
from dagster_rayslurm.runtime.payload.results import OutputSearch
from dagster_rayslurm.runtime.process import processes
from dagster_rayslurm.runtime.process.processes import Process
from dagster_rayslurm.runtime.protocol import spec
from dagster_rayslurm.runtime.ray.ray_node import last_error_line

from ..conftest import wait_until


def test_specs_survive_json() -> None:
    ray = spec.RaySpec(num_cpus=2, resources={"x": 1.5}, labels={"ä": "ö"})
    runtime = spec.RuntimeSpec("c1", ray=ray, idle_timeout=3)
    assert spec.from_json(spec.RuntimeSpec, spec.to_json(runtime)) == runtime
    one = spec.PayloadSpec(argv=["a b", "'"], nonce="n", env={"A": "\n"})
    assert spec.from_json(spec.PayloadSpec, spec.to_json(one)) == one


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        ('{"cluster_id": "c", "protocol": 99}', "version 99"),
        ('{"cluster_id": "c", "colour": 1}', "unknown keys: colour"),
        ("{}", "incomplete"),
        ('{"cluster_id": "c", "ray": {"x": 1}}', "unknown keys: x"),
    ],
)
def test_a_spec_that_cannot_be_used_says_why(text: str, says: str) -> None:
    with pytest.raises(spec.SpecError, match=says):
        spec.from_json(spec.RuntimeSpec, text)


@pytest.mark.parametrize(
    ("log", "words"),
    [
        # What `ray start` of Ray 2.60 says of an object store that is too large, of bad labels, and of nothing at all.
        (
            '  File "/opt/ray/lib/python3.11/site-packages/ray/_private/resource_and_label_spec.py", line 432, in resolve\n'
            "    raise ValueError(\n"
            "ValueError: After taking into account object store and redis memory usage, the amount of memory on this node "
            "available for tasks and actors (-76.5 GB) is less than -302% of total.\n",
            "ValueError: After taking into account object store and redis memory usage, the amount of memory on this node "
            "available for tasks and actors (-76.5 GB) is less than -302% of total.",
        ),
        (
            "2026-11-22 19:56:14,129\tPANIC scripts.py:886 -- \x1b[31m`\x1b[1m--labels=a=b=c\x1b[22m\x1b[26m` is not a valid "
            "string of key-value pairs\x1b[39m\nError: `{}` is not a valid string of key-value pairs, detailed error: {}\n",
            "`--labels=a=b=c` is not a valid string of key-value pairs",
        ),
        ("2026-11-22 19:56:22,808\tINFO scripts.py:1043 -- \x1b[37mLocal node IP\x1b[39m: 10.9.9.9\n", ""),
        ("", ""),
    ],
)
def test_the_log_of_ray_start_ends_with_why(log: str, words: str) -> None:
    assert last_error_line(log) == words


def test_the_archive_is_reproducible_and_named_by_its_content(tmp_path: Path) -> None:
    assert build_runtime() == build_runtime.__wrapped__()  # It is built anew.
    path = install_runtime(tmp_path)
    assert path.name == runtime_name() and install_runtime(tmp_path) == path
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        names = archive.namelist()
        assert all(f"{name}c" in names for name in names if name.endswith(".py"))


def test_another_python_takes_the_sources(tmp_path: Path) -> None:
    """Bytecode of an unknown version is passed over."""
    path = install_runtime(tmp_path)
    foreign = tmp_path / "foreign.pyz"
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(foreign, "w") as copy:
        for name in archive.namelist():
            content = archive.read(name)
            copy.writestr(name, b"\0\0\r\n" + content[4:] if name.endswith(".pyc") else content)
    said = subprocess.run([sys.executable, "-I", str(foreign), "walk"], capture_output=True, text=True)
    assert said.returncode == 1 and "ray-node" in said.stderr


def test_the_runtime_needs_nothing_but_the_standard_library(tmp_path: Path) -> None:
    """`-I -S`: no site-packages at all."""
    path = install_runtime(tmp_path)
    with zipfile.ZipFile(path) as archive:
        modules = [
            name[:-3].replace("/", ".")
            for name in archive.namelist()
            if name.endswith(".py") and name.count("/") and "__" not in name
        ]
    code = f"import sys; sys.path.insert(0, {str(path)!r}); import {', '.join(modules)}; print(len(sys.modules))"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True, capture_output=True)


def test_the_runtime_explains_itself(tmp_path: Path) -> None:
    path = install_runtime(tmp_path)
    for arguments in ([], ["walk"]):
        said = subprocess.run([sys.executable, "-I", str(path), *arguments], capture_output=True, text=True)
        assert said.returncode == 1 and "ray-node" in said.stderr


def test_a_runtime_without_its_spec_says_so(tmp_path: Path) -> None:
    path = install_runtime(tmp_path)
    said = subprocess.run([sys.executable, "-I", str(path), "run", str(tmp_path)], capture_output=True, text=True)
    assert said.returncode != 0 and "runtime.json" in said.stderr


def test_pipes_parameters_are_those_of_dagster_pipes() -> None:
    assert decode_param(environment.pipes_param({"path": "/ä b"})) == {"path": "/ä b"}


def test_the_environment_of_a_payload() -> None:
    one = spec.PayloadSpec(argv=["x"], nonce="n", env={"FOO": "1", "PATH_LIKE": "a:b"}, uses_ray=True)
    inherited = {
        "PATH": "/usr/bin",
        "RAY_ADDRESS": "other:1",
        "DAGSTER_PIPES_CONTEXT": "old",
        "RAYSLURM_X": "old",
        "RAY_KEEP": "me",
    }
    env = environment.payload_environment(one, inherited, "/env/bin/python", "/run/d", "/s/m", {"RAY_ADDRESS": "mine:2"})
    assert env["PATH"] == "/env/bin:/usr/bin" and env["RAY_KEEP"] == "me" and env["RAY_ADDRESS"] == "mine:2"
    assert "RAYSLURM_X" not in env
    assert decode_param(env["DAGSTER_PIPES_MESSAGES"]) == {"path": "/s/m"}
    job = json.loads(env["RAY_JOB_CONFIG_JSON_ENV_VAR"])
    assert job == {"runtime_env": {"env_vars": one.env}, "metadata": {"rayslurm": "n"}}
    assert env["RAY_OVERRIDE_JOB_RUNTIME_ENV"] == "1"


@pytest.mark.parametrize(
    ("extra", "worker_env", "job_env"),
    [
        ({}, {"RAYSLURM_DATA_DIR": "/data"}, None),
        ({}, {"RAYSLURM_DATA_DIR": "/other"}, {"RAYSLURM_DATA_DIR": "/data"}),
        ({}, {}, {"RAYSLURM_DATA_DIR": "/data"}),
        ({"FOO": "1"}, {"RAYSLURM_DATA_DIR": "/data"}, {"FOO": "1"}),
    ],
)
def test_workers_start_anew_only_for_what_they_do_not_inherit(
    extra: dict[str, str], worker_env: dict[str, str], job_env: dict[str, str] | None
) -> None:
    one = spec.PayloadSpec(argv=["x"], nonce="n", env=extra, data_dir="/data", uses_ray=True)
    assert environment.shared_variables(one) == {"RAYSLURM_DATA_DIR": "/data"}
    env = environment.payload_environment(one, {}, "/env/bin/python", "/run/d", "/s/m", {}, worker_env)
    job = json.loads(env["RAY_JOB_CONFIG_JSON_ENV_VAR"])
    assert job["metadata"] == {"rayslurm": "n"} and env["RAYSLURM_DATA_DIR"] == "/data"
    assert job.get("runtime_env") == (None if job_env is None else {"env_vars": job_env})
    assert ("RAY_OVERRIDE_JOB_RUNTIME_ENV" in env) == (job_env is not None)


def test_the_work_dir_links_sources_and_extra_files(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "pkg").mkdir(parents=True)
    (source / "config.yaml").write_text("theirs")
    extra = tmp_path / "elsewhere" / "config.yaml"
    extra.parent.mkdir()
    extra.write_text("mine")
    work = tmp_path / "work"
    one = spec.PayloadSpec(argv=["x"], nonce="n", working_dir=str(source), extra_files=[str(extra)])
    environment.lay_out_work_dir(str(work), one)
    assert (work / "config.yaml").read_text() == "mine" and (source / "config.yaml").read_text() == "theirs"
    (work / "new.txt").write_text("x")
    assert not (source / "new.txt").exists()


def test_after_a_requeue_a_file_of_the_payload_replaces_the_input(tmp_path: Path) -> None:
    source, extra, work = tmp_path / "source", tmp_path / "state.json", tmp_path / "work"
    source.mkdir()
    (source / "config.ini").write_text("theirs")
    extra.write_text("begin")
    one = spec.PayloadSpec(argv=["x"], nonce="n", working_dir=str(source), extra_files=[str(extra)])
    environment.lay_out_work_dir(str(work), one)
    for name in ("config.ini", "state.json"):
        (tmp_path / "new").write_text("mine")
        (tmp_path / "new").rename(work / name)
    environment.lay_out_work_dir(str(work), one)
    assert (work / "config.ini").read_text() == (work / "state.json").read_text() == "mine"
    assert (source / "config.ini").read_text() == "theirs" and extra.read_text() == "begin"


def find_outputs(work_dir: Path, patterns: list[str], max_bytes: int = 50) -> OutputSearch:
    search = OutputSearch(str(work_dir), patterns, max_bytes)
    for _ in search.run():
        continue
    return search


def names(search: OutputSearch) -> list[object]:
    return [entry["name"] for entry in search.files]


def test_outputs_are_listed_smallest_first_within_the_limit(tmp_path: Path) -> None:
    work = tmp_path / "work[1]"
    (work / "sub").mkdir(parents=True)
    (work / "a.png").write_bytes(b"1" * 10)
    (work / "sub" / "b.png").write_bytes(b"2" * 20)
    (work / "big.png").write_bytes(b"3" * 1000)
    found = find_outputs(work, ["**/*.png", "*.csv"])
    assert found.files == [{"name": "a.png", "size": 10}, {"name": "sub/b.png", "size": 20}]
    assert [line for line in found.left_out if "big.png (1000 bytes)" in line] and "'*.csv'" in found.left_out[0]


@pytest.mark.parametrize(
    "pattern",
    ["**", "**/*", "**/*.x", "a/**", "a/**/*.x", "**/b/*", "*/**/c.x", "**/**/c.x", "a/b/c.x", ".h/*", "**/.h.x", "?/[ab]/*"],
)
def test_output_patterns_match_as_glob_does(tmp_path: Path, pattern: str) -> None:
    for name in ("c.x", "a/c.x", "a/b/c.x", "a/b/d", ".h/c.x", "a/.h/c.x", "a/.h.x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    expected = {
        os.path.relpath(path, tmp_path) for path in glob.glob(f"{tmp_path}/{pattern}", recursive=True) if os.path.isfile(path)
    }
    assert set(names(find_outputs(tmp_path, [pattern]))) == expected


def test_inputs_are_no_outputs(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "old").mkdir(parents=True)
    (source / "old" / "plot.png").write_text("x")
    (source / "input.png").write_text("x")
    work = tmp_path / "work"
    environment.lay_out_work_dir(str(work), spec.PayloadSpec(argv=["x"], nonce="n", working_dir=str(source)))
    (work / "new.png").write_text("y")
    found = find_outputs(work, ["**/*.png", "input.png"])
    assert names(found) == ["new.png"] and "'input.png'" in found.left_out[0]


def test_links_among_the_outputs_of_a_payload_are_outputs(tmp_path: Path) -> None:
    (tmp_path / "epoch3").mkdir()
    (tmp_path / "epoch3" / "w.pt").write_text("x")
    (tmp_path / "latest").symlink_to("epoch3")
    (tmp_path / "last.pt").symlink_to("epoch3/w.pt")
    (tmp_path / "passwd").symlink_to("/etc/passwd")
    found = find_outputs(tmp_path, ["last.pt", "latest/*", "passwd"])
    assert names(found) == ["last.pt", "latest/w.pt"] and found.left_out == ["no file that the payload made matches 'passwd'"]


def test_the_archive_has_sub_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package"
    (package / "sub" / "deep").mkdir(parents=True)
    for name in ("__init__.py", "sub/__init__.py", "sub/deep/__init__.py"):
        (package / name).write_text("")
    (package / "sub" / "deep" / "part.py").write_text("from ... import __name__ as above")
    monkeypatch.setattr(archive, "runtime", SimpleNamespace(__file__=str(package / "__init__.py")))
    monkeypatch.setattr(archive, "_sources", archive._sources.__wrapped__)
    built = tmp_path / "runtime.pyz"
    built.write_bytes(build_runtime.__wrapped__())
    code = f"from {archive.PACKAGE}.sub.deep.part import above; print(above)"
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(built)}, capture_output=True, text=True)
    assert done.stdout == f"{archive.PACKAGE}\n", done.stderr


def test_a_file_that_vanishes_during_the_search_is_no_output(tmp_path: Path) -> None:
    for name in ("gone", "good"):
        (tmp_path / name).write_text("x")
    search = OutputSearch(str(tmp_path), ["gone", "good"], 50)
    steps = search.run()
    next(steps)
    (tmp_path / "gone").unlink()
    list(steps)
    assert names(search) == ["good"] and search.left_out == ["no file that the payload made matches 'gone'"]


def test_the_names_of_many_outputs_fit_into_the_end(tmp_path: Path) -> None:
    for number in range(200):
        (tmp_path / f"{number}.png").write_text("x")
    left_out = find_outputs(tmp_path, ["*"], 0).left_out
    assert len(left_out) == 51 and left_out[-1] == "and 150 more"


def test_outputs_cannot_climb_out(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "secret").write_text("x")
    assert find_outputs(tmp_path / "work", ["../secret"]).files == []


def alone(*processes: Process) -> Attribution:
    return Attribution(list(processes), [], set())


def test_usage_counts_only_its_own_window() -> None:
    meter = usage.UsageMeter([Process(7, 1, 100.0)], started=0.0)
    meter.add(1.0, alone(Process(7, 1, 100.5), Process(8, 1, 0.5)), memory=300)
    meter.add(2.0, alone(Process(7, 1, 101.0)), memory=200)  # 8 ended; what it used stays counted.
    meter.add_ended(2.5, 8, 0.75)
    summary = meter.summary()
    assert summary["cpu_seconds"] == pytest.approx(1.75) and summary["peak_memory"] == 300
    assert summary["elapsed"] == 2.5 and summary["points"][0] == [1.0, 1.0, 300.0]


def test_usage_points_stay_bounded() -> None:
    meter = usage.UsageMeter([], started=0.0)
    for second in range(5000):
        meter.add(float(second + 1), alone(Process(7, 1, second / 2)), memory=1)
    assert len(meter.usage.points) <= 240 and meter.usage.points[-1][0] > 4900


def test_descendants_are_found_and_ended() -> None:
    code = (
        "import os,sys,subprocess,time\n"
        "sys.path.insert(0, %r)\n"
        "from dagster_rayslurm.runtime.process import processes as keeper; processes = keeper\n"
        "processes.become_subreaper()\n"
        # A grandchild in a session of its own, whose parent is gone: an orphan of nobody but the subreaper.
        "subprocess.run(['setsid','sh','-c','sleep 60 & sleep 0.1'])\n"
        "found=[p.pid for p in processes.descendants(os.getpid())]\n"
        "left=processes.kill_descendants(os.getpid(), keeper.reap)\n"
        "print(len(found), left, len(processes.descendants(os.getpid())))" % os.getcwd()
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["1", "[]", "0"]


def test_environment_of_a_process_is_matched_exactly() -> None:
    child = subprocess.Popen(["sleep", "60"], env={"RAYSLURM_RUN_DIR": "/a/b"})
    try:
        assert wait_until(lambda: processes.has_environment(child.pid, "RAYSLURM_RUN_DIR=/a/b"))
        assert not processes.has_environment(child.pid, "RAYSLURM_RUN_DIR=/a")
    finally:
        child.kill()
        child.wait()


@given(st.binary(max_size=400), st.lists(st.integers(1, 7), max_size=60))
def test_bytes_of_any_kind_cut_anywhere_decode_alike(data: bytes, cuts: list[int]) -> None:
    calls: list[Callable[[], None]] = []
    texts: list[str] = []
    received: list[Awaited] = []
    loop: Any = SimpleNamespace(on_readable=lambda fd, call: calls.append(call), forget=lambda fd: None)
    files = SimpleNamespace(output=lambda _, text, at: texts.append(text))
    payload: Any = SimpleNamespace(safely=lambda call: call(), files=files, received=received.append)
    process = PayloadProcess(loop, payload)
    reader, writer = os.pipe()
    process.read_stream("stdout", reader)
    rest = data
    for size in [*cuts, len(data)]:
        if rest:
            os.write(writer, rest[:size])
            calls[0]()
        rest = rest[size:]
    os.close(writer)
    calls[0]()
    assert "".join(texts) == data.decode("utf-8", "replace")
    assert received == [Awaited.OUTPUT] and not process.streams


def test_a_signal_just_after_the_runtimes_end_is_no_error() -> None:
    """There is nobody left to pass it on to, and what the runtime left behind is still to be ended."""
    program = textwrap.dedent("""
        import os, signal, subprocess, sys
        from dagster_rayslurm.runtime.process import processes as keeper
        from dagster_rayslurm.runtime.process import processes
        wait = keeper._wait
        def waited(child):
            code = wait(child)
            os.kill(os.getpid(), signal.SIGTERM)
            return code
        keeper._wait = waited
        def main():
            subprocess.Popen(["sleep", "60"])
            return 3
        print(keeper.guard(main), [each.pid for each in processes.descendants(os.getpid())])
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert (done.stdout.strip(), done.stderr) == ("3 []", "")


@pytest.mark.parametrize("node_id", ["0", "1"])
def test_a_session_without_its_slurmstepd_has_its_job_cancelled(node_id: str, tmp_path: Path) -> None:
    asked, over = tmp_path / "asked", tmp_path / "over"
    (tmp_path / "scancel").write_text(f'#!/bin/sh\necho "$@" >>{asked}\n')
    (tmp_path / "scancel").chmod(0o755)
    program = textwrap.dedent("""
        import os, signal, sys, time
        from dagster_rayslurm.runtime.process import processes as keeper
        waits = []
        def main():
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
            open(sys.argv[2], "w").close()
            time.sleep(60)
        def orphaned():
            keeper.cancel_own_job(os.environ, waits.append)
            open(sys.argv[1], "w").write(repr(waits))
        keeper.guard(main, in_a_step=True, orphaned=orphaned)
    """)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_NODEID": node_id, "SLURM_JOB_ID": "7"}
    guarded = tmp_path / "guarded"
    words = [sys.executable, "-c", program, str(over), str(guarded)]
    stepd = subprocess.Popen([sys.executable, "-c", f"import subprocess; subprocess.run({words!r})"], env=env)
    # A keeper that starts after its slurmstepd has ended does not know whose child it was.
    assert wait_until(guarded.exists, 60)
    stepd.kill()
    stepd.wait()
    assert wait_until(lambda: over.exists() and over.read_text(), 60)
    lead = node_id == "0"
    assert over.read_text() == ("[25.0]" if lead else "[]")
    assert asked.exists() == lead and (not lead or asked.read_text() == "--quiet 7\n")


def test_what_a_timer_sets_for_at_once_holds_nothing_else_up() -> None:
    program = textwrap.dedent("""
        import os
        from dagster_rayslurm.runtime.process.loop import Loop
        loop = Loop()
        reader, writer = os.pipe()
        loop.on_readable(reader, loop.stop)
        def again():
            loop.call_later(0.0, again)
        again()
        os.write(writer, b"x")
        loop.run()
    """)
    assert subprocess.run([sys.executable, "-c", program], timeout=20).returncode == 0


def test_a_signal_after_hundreds_of_ends_of_children_is_not_lost() -> None:
    program = textwrap.dedent("""
        import os, signal
        from dagster_rayslurm.runtime.process.loop import Loop
        loop, heard = Loop(), []
        loop.on_signal(signal.SIGTERM, heard.append)
        loop.spawn(["true"], lambda code, _: heard.append(code))
        for _ in range(2000):
            os.kill(os.getpid(), signal.SIGCHLD)
        os.kill(os.getpid(), signal.SIGTERM)
        loop.call_later(20, loop.stop)
        def look():
            loop.stop() if len(heard) == 2 else loop.call_later(0.01, look)
        look()
        loop.run()
        loop.resume(0.1)
        print(*map(int, heard))
    """)
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60).stdout == "15 0\n"
