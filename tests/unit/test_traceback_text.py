"""Exceptions in one line, from what Python 3.8 and 3.11 and Ray 2.60 said of payloads that failed in known ways."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_rayslurm.follow import Evidence
from dagster_rayslurm.outcome.verdict import exception_in_words, judge, read_traceback, traceback_of

SAID: dict[str, Any] = json.loads(Path(__file__).with_name("python_said").joinpath("exceptions.json").read_text())
"""By payload: what Pipes told of its exception, or its standard error."""

WORDS = {
    "nested": "KeyError: 'momentum' (deep.py:6, in inner, on c1)",
    "task": "ValueError: two (deep.py:6, in inner, on c1)",
    "task_dep": "KeyError: 'momentum' (deep.py:6, in inner, on c1)",
    "generator": "KeyError: 'momentum' (in inner, on c1)",  # Ray leaves the line out.
    "chained": "RuntimeError: no momentum (deep.py:9, in inner, on c1), caused by KeyError: 'momentum' (in inner, on c1)",
    "context": "RuntimeError: no momentum (deep.py:9, in inner, on c1)",
    "outer_from": "RuntimeError: no fit (deep.py:13, in outer, on c1), caused by KeyError: 'momentum' (deep.py:6, in inner, "
    "on c1)",
    "actor": "ZeroDivisionError: division by zero (deep.py:9, in deeper, on c1)",
    "async_actor": "KeyError: 'momentum' (deep.py:7, in step, on c1)",
    "actor_init": "FileNotFoundError: weights.bin (deep.py:7, in __init__, on c1)",
    "actor_died": "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task, class_name Trainer, "
    "ip 10.0.0.5 (deep.py:11, in main)",
    "worker_crashed": "ray.exceptions.WorkerCrashedError: The worker died unexpectedly while executing this task. Check "
    "python-core-worker-*.log files for more information. (deep.py:9, in main)",
    "cancelled": "ray.exceptions.TaskCancelledError (deep.py:12, in main)",
    "get_timeout": "ray.exceptions.GetTimeoutError: Get timed out: some object(s) not ready. (deep.py:9, in main)",
    "unpicklable": "Odd: 1 and 2 (deep.py:11, in inner, on c1)",
    "local_class": "inner.<locals>.MyError: local class (deep.py:8, in inner, on c1)",
    "assertion": "AssertionError (deep.py:6, in inner, on c1)",
    "in_library": "json.decoder.JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 (char 1) "
    "(deep.py:7, in inner, on c1)",
    "missing_in_task": "ModuleNotFoundError: No module named 'lightgbmm' (deep.py:6, in inner, on c1)",
    "syntax_in_task": "ray.exceptions.RayTaskError(SyntaxError): <no detail available> (deep.py:9, in main)",
    "driver": "FileNotFoundError: [Errno 2] No such file or directory: 'data.csv' (deep.py:5, in main)",
    "driver_from": "RuntimeError: training failed (deep.py:12, in main), caused by KeyError: 'momentum' (deep.py:6, in inner, "
    "on c1)",
    "driver_context": "RuntimeError: training failed (deep.py:8, in main)",
    "group": "ExceptionGroup: several (2 sub-exceptions) (deep.py:5, in main)",
    "note": "ValueError: one (deep.py:7, in main)",
    "numpy": "TypeError: Object of type float32 is not JSON serializable (deep.py:6, in main)",
    "num_cpus": "ValueError: When connecting to an existing cluster, num_cpus and num_gpus must not be provided. (deep.py:5, in "
    "main)",
    "nested, stderr": "KeyError: 'momentum' (deep.py:6, in inner, on c1)",
    "task, stderr": "ValueError: two (deep.py:6, in inner, on c1)",
    "actor_init, stderr": "FileNotFoundError: weights.bin (deep.py:7, in __init__, on c1)",
    "driver_from, stderr": "RuntimeError: training failed (deep.py:12, in main), caused by KeyError: 'momentum' (deep.py:6, in "
    "inner, on c1)",
    "group, stderr": "ExceptionGroup: several (2 sub-exceptions) (deep.py:5, in main)",
    "note, stderr": "ValueError: one (deep.py:7, in main)",
    "syntax_in_task, stderr": "SyntaxError: invalid syntax (deep.py:6, in inner, on c1)",
    "worker_crashed, stderr": "ray.exceptions.WorkerCrashedError: The worker died unexpectedly while executing this task. Check "
    "python-core-worker-*.log files for more information. (deep.py:9, in main)",
    "gone.py, stderr": "ModuleNotFoundError: No module named 'lightgbmm' (gone.py:1)",
    "broken.py, stderr": "SyntaxError: '(' was never closed (broken.py:1)",
    "imports_broken.py, stderr": "SyntaxError: '(' was never closed (broken.py:1)",
    "del_after.py, stderr": "KeyError: 'momentum' (del_after.py:4)",
    "logged.py, stderr": "KeyError: 'momentum' (logged.py:3)",
    "thread.py, stderr": "",
    "old.py, Python 3.8": "SyntaxError: invalid syntax (old.py:2)",
    "broken.py, Python 3.8": "SyntaxError: invalid syntax (broken.py:2)",
}


@pytest.mark.parametrize("payload", SAID)
def test_an_exception_becomes_one_line_with_its_place_in_user_code(payload: str) -> None:
    said = SAID[payload]
    found = read_traceback(said if isinstance(said, str) else traceback_of(said))
    assert (exception_in_words(found, {"10.0.0.5": "c1"}) if found else "") == WORDS[payload]


@given(st.text(alphabet='\n \t|+()<>:,"FEile123.ray::Traceback(most recent call last):\x1b[0m'))
def test_any_text_is_read_without_an_error(text: str) -> None:
    found = read_traceback(text)
    assert not found or "\n" not in exception_in_words(found, {})


def _ended(stderr: str, code: int = 1, exception: Any = None) -> str:
    nodes = [{"address": "10.0.0.5", "hostname": "c1"}]
    end = {"type": "end", "reason": "exit", "exit_code": code, "signal": None, "message": None, "context": {"nodes": nodes}}
    evidence = Evidence(end=end, exception=exception)
    evidence.add_output({"s": "stdout", "d": "Epoch 1: 0.3\n"})
    evidence.add_output({"s": "stderr", "d": stderr})
    return judge(evidence, True, True).sentence


def test_a_ray_task_failure_shows_its_cause_without_colours() -> None:
    sentence = _ended("", exception=SAID["nested"])
    assert sentence == "the payload raised KeyError: 'momentum' (deep.py:6, in inner, on c1)" and "\x1b" not in sentence


def test_an_exception_without_detail_is_taken_from_the_output() -> None:
    sentence = _ended(SAID["syntax_in_task, stderr"], exception=SAID["syntax_in_task"])
    assert sentence == "the payload raised SyntaxError: invalid syntax (deep.py:6, in inner, on c1)"


@pytest.mark.parametrize("payload", ["gone.py, stderr", "old.py, Python 3.8", "del_after.py, stderr", "nested, stderr"])
def test_a_failure_without_pipes_is_explained_by_its_traceback(payload: str) -> None:
    assert _ended(SAID[payload]) == f"the payload raised {WORDS[payload]}"


def test_a_logged_traceback_is_not_the_cause_of_the_end() -> None:
    told = _ended(SAID["logged.py, stderr"], 2)
    assert told == "the payload ended with exit code 2, after KeyError: 'momentum' (logged.py:3)"
    told = _ended(SAID["logged.py, stderr"] + "more\n" * 99, 2)
    assert told == "the payload ended with exit code 2; its standard error ends with: more"


@pytest.mark.parametrize(
    ("stderr", "ends"),
    [
        (
            "usage: train.py [-h]\ntrain.py: error: unrecognized arguments: --x\n\n",
            "train.py: error: unrecognized arguments: --x",
        ),
        (" 10%|#\r 20%|##\rdisk full", "disk full"),
        ("no disk\n2026-11-22 19:06:28,708\tINFO worker.py:2038 -- Connected to Ray cluster.\n(f pid=1) x\n", "no disk"),
        ("2026-11-22 19:06:28,708\tINFO worker.py:2038 -- Connected to Ray cluster.\n", ""),
        ("", ""),
    ],
)
def test_an_exit_code_comes_with_the_last_line_that_may_explain_it(stderr: str, ends: str) -> None:
    assert _ended(stderr, 3) == "the payload ended with exit code 3" + (ends and f"; its standard error ends with: {ends}")
