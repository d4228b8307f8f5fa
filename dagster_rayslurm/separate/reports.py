"""Merge the results that payloads of several components report, so that Dagster gets one for each asset and asset check."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
"""A Pipes message with method and parameters, or only its parameters."""
Reports = Sequence[tuple[str, Mapping[str, Any]]]
"""All reports about one asset or asset check: for each, the reporting component and the parameters of its message."""

_MATERIALIZATION = "report_asset_materialization"
_CHECK = "report_asset_check"
_SEVERITIES = ("WARN", "ERROR")
"""Severities of asset checks, the worst last."""


class ReportedTwice(ValueError):
    """Raised when one component reports an asset or check twice that another component reports, too."""

    def __init__(self, component: str, what: str) -> None:
        super().__init__(f"component {component!r} reports {what} twice, and another component reports it, too; report it once")
        self.component = component


class ReportMerger:
    """Forwards the Pipes messages of several payloads to Dagster's one handler, with their results merged.

    Results wait until all payloads have ended, because only then all reports about an asset are known. `closed` messages
    wait, too, because Dagster expects no message after them.

    Args:
        components: the components, in the order in which their reports are merged.
        check: raises what Dagster's handler would raise for a result, so that a bad result is refused at once.
    """

    def __init__(self, handler: Any, components: Iterable[str], check: Callable[[Any], object]) -> None:
        self._handler = handler
        self._order = {component: index for index, component in enumerate(components)}
        self._check = check
        self._results: list[tuple[str, Message]] = []
        self._closed: list[tuple[str, Message]] = []

    def of(self, component: str) -> ComponentHandler:
        """Returns the message handler for the payload of one component."""
        return ComponentHandler(self, component)

    def add(self, component: str, message: Message) -> None:
        """Forward one message, or keep it for `hand_over`; raises what Dagster raises for the message."""
        if message["method"] in _MERGE:
            self._check(message)
            self._results.append((component, message))
        elif message["method"] == "closed":
            self._closed.append((component, message))
        else:
            self._handler.handle_message(message)

    def hand_over(self) -> list[tuple[str, Exception]]:
        """Merge the results and pass all kept messages to Dagster; returns each refusal, with a component that caused it."""
        refused: list[tuple[str, Exception]] = []
        reports: dict[tuple[str, str, str | None], list[tuple[str, Mapping[str, Any]]]] = {}
        for component, message in sorted(self._results, key=lambda each: self._order[each[0]]):
            params = message["params"]
            key = (message["method"], params["asset_key"], params.get("check_name"))
            reports.setdefault(key, []).append((component, params))
        for (method, *_), same in reports.items():
            try:
                for params in _MERGE[method](same):
                    self._handler.handle_message({"method": method, "params": params})
            except Exception as error:  # noqa: BLE001 - Dagster's handler raises anything on a malformed message
                refused.append((error.component if isinstance(error, ReportedTwice) else same[-1][0], error))
        for component, message in self._closed:
            try:
                self._handler.handle_message(message)
            except Exception as error:  # noqa: BLE001 - the message carries the user's exception, which may be malformed
                refused.append((component, error))
        self._results.clear()
        self._closed.clear()
        return refused


@dataclass(frozen=True)
class ComponentHandler:
    """The message handler of one component's payload, in place of Dagster's: passes messages to the `ReportMerger`."""

    merger: ReportMerger
    component: str

    def handle_message(self, message: Message) -> None:
        self.merger.add(self.component, message)


def merge(reports: Reports) -> list[Message]:
    """Merges the materializations of one asset into one; returns reports that all come from one component unchanged.

    Raises:
        ValueError: the data versions differ, or one component reports twice.
    """
    asset_key = reports[0][1]["asset_key"]
    by_component = _by_component(reports, f"asset {asset_key!r}")
    if by_component is None:
        return [dict(params) for _, params in reports]
    versions: dict[str, str] = {}
    for component, params in by_component.items():
        if params["data_version"] is not None:
            versions.setdefault(params["data_version"], component)
    if len(versions) > 1:
        each = " and ".join(f"{version!r} in component {component!r}" for version, component in versions.items())
        raise ValueError(f"asset {asset_key!r} has data_version {each}; report it in one of them")
    return [{"asset_key": asset_key, "metadata": _merged_metadata(by_component), "data_version": next(iter(versions), None)}]


def merge_checks(reports: Reports) -> list[Message]:
    """Merges the results of one asset check into one; returns reports that all come from one component unchanged.

    The check passed if it passed in all components. If it did not, the severity is the worst of the components that failed.

    Raises:
        ValueError: one component reports twice.
    """
    asset_key, check_name = reports[0][1]["asset_key"], reports[0][1]["check_name"]
    by_component = _by_component(reports, f"asset check {check_name!r} of {asset_key!r}")
    if by_component is None:
        return [dict(params) for _, params in reports]
    failed = [params for params in by_component.values() if not params["passed"]]
    severity = max((params["severity"] for params in failed or by_component.values()), key=_SEVERITIES.index)
    return [
        {
            "asset_key": asset_key,
            "check_name": check_name,
            "passed": not failed,
            "severity": severity,
            "metadata": _merged_metadata(by_component),
        }
    ]


_MERGE = {_MATERIALIZATION: merge, _CHECK: merge_checks}
"""How to merge the results of several components, by the method of their messages."""


def _by_component(reports: Reports, what: str) -> dict[str, Mapping[str, Any]] | None:
    """Returns the report of each component; None if all reports come from one component.

    Raises:
        ReportedTwice: there are several components, and one of them reports twice.
    """
    by_component = dict(reports)
    if len(by_component) == 1:
        return None
    names = [component for component, _ in reports]
    for component in by_component:
        if names.count(component) > 1:
            raise ReportedTwice(component, what)
    return by_component


def _merged_metadata(by_component: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the metadata of all components; keys with different values get the component's name."""
    own = {component: params["metadata"] or {} for component, params in by_component.items()}
    taken = {key for metadata in own.values() for key in metadata}
    merged: dict[str, Any] = {}
    for key in dict.fromkeys(key for metadata in own.values() for key in metadata):
        values = {component: metadata[key] for component, metadata in own.items() if key in metadata}
        # Values are compared as JSON, in which they came, because 1, 1.0 and True are equal in Python.
        if len({json.dumps(value, sort_keys=True) for value in values.values()}) == 1:
            merged[key] = next(iter(values.values()))
            continue
        for component, value in values.items():
            name = _free(f"{key} ({component})", taken)
            taken.add(name)
            merged[name] = value
    return merged


def _free(name: str, taken: Iterable[str]) -> str:
    """Returns the name, with a number behind it if the name is taken."""
    return next(each for each in itertools.chain([name], (f"{name} {n}" for n in itertools.count(2))) if each not in taken)
