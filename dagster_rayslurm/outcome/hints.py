"""Hints for the user about common exceptions of payloads. Pure, except that files beside the script are looked for."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ..errors import FailureKind
from ..follow import Evidence
from ..plan import Plan
from .verdict import Verdict


def with_hint(verdict: Verdict, plan: Plan, evidence: Evidence) -> Verdict:
    """Returns the verdict; a hint is added to its sentence if the sentence shows a common exception of payloads."""
    if verdict.kind != FailureKind.PAYLOAD:
        return verdict
    context: Mapping[str, Any] = (evidence.end or {}).get("context") or {}
    for pattern, hint_of in _HINTS.items():
        match = re.search(pattern, verdict.sentence)
        if match and (hint := hint_of(match, plan, context)):
            return replace(verdict, sentence=f"{verdict.sentence}; {hint}")
    return verdict


def _missing_module(match: re.Match[str], plan: Plan, context: Mapping[str, Any]) -> str:
    """Returns how to get a module to the payload that cannot be imported."""
    name = match[1].partition(".")[0]
    if _is_beside(plan, f"{name}.py") or _is_beside(plan, name):
        return _not_sent(plan, name, "name that directory in the launcher's working_dir")
    environment = context.get("python") or "the payload's Python"
    return f"install it in the environment of {environment}, or name the directory that has it in the launcher's working_dir"


def _missing_file(match: re.Match[str], plan: Plan, context: Mapping[str, Any]) -> str:  # noqa: ARG001
    """Returns how to send a file that the payload did not find; "" for an absolute path or a program."""
    if os.path.isabs(match[1]) or not ("." in match[1] or "/" in match[1]):  # A name without dot and slash may be a program.
        return ""
    what_to_do = "name it in extra_files=, or its directory in the launcher's working_dir"
    if _is_beside(plan, match[1]):
        return _not_sent(plan, match[1], what_to_do)
    return f"a payload has a working directory of its own: {what_to_do}"


def _old_python(match: re.Match[str], plan: Plan, context: Mapping[str, Any]) -> str:  # noqa: ARG001
    """Returns that the payload's Python is older than Dagster's; "" if it is not."""
    theirs = str(context.get("python_version") or "")
    ours = sys.version.split()[0]
    if not theirs or _major_minor(theirs) >= _major_minor(ours):
        return ""
    return f"the payload's Python is {theirs}, that of Dagster {ours}: write for the older one, or choose another environment"


def _major_minor(version: str) -> list[int]:
    return [int(number) for number in version.split(".")[:2]]


def _always(hint: str) -> Callable[..., str]:
    """Returns a function that returns the hint, whatever its arguments."""
    return lambda *_: hint


def _is_beside(plan: Plan, name: str) -> bool:
    """Whether the script's directory on this machine has a file or directory of this name."""
    return plan.script is not None and os.path.exists(os.path.join(os.path.dirname(plan.script), name))


def _not_sent(plan: Plan, name: str, what_to_do: str) -> str:
    """Returns a hint that a file beside the script is not sent with the script."""
    return f"{name} is beside {os.path.basename(plan.script or '')} here, but only the script itself is sent: {what_to_do}"


_HINTS: Mapping[str, Callable[[re.Match[str], Plan, Mapping[str, Any]], str]] = {
    r"No module named '?([\w.]+)": _missing_module,
    r"FileNotFoundError: .*No such file or directory: '([^']+)'": _missing_file,
    r"SyntaxError: |TypeError: unsupported operand type\(s\) for \||TypeError: '(type|ABCMeta)' object is not subscriptable": (
        _old_python
    ),
    r"Object of type (u?int|float|complex)\d+ is not JSON|Object of type (bool_?|ndarray|Tensor) is not JSON": _always(
        "convert it with .item() or float(), an array with .tolist()"
    ),
    r"When connecting to an existing cluster, num_cpus and num_gpus": _always(
        "the cluster runs already: call ray.init() without them, and set num_cpus_per_node and num_gpus_per_node of RayLauncher"
    ),
    r"report_asset_check`? without passing an asset key": _always("pass asset_key="),
}
"""Functions that return a hint, by the pattern that they need in the verdict's sentence; "" if the hint does not apply."""
