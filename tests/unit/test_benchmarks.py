"""What becomes of the benchmarks' samples: results that are merged, checked for losses, and rendered."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.catalogue import BENCHMARKS, SECTIONS
from benchmarks.charts import Group, bars
from benchmarks.check import compare
from benchmarks.figures import Figure, Options, Sample
from benchmarks.report import DRAWN, render
from benchmarks.results import Measured, Part, Results, ResultsError, from_json
from benchmarks.slurm.phases import PHASES, figures, from_journal, from_processes

ROOT = Path(__file__).resolve().parents[2]


def figure(name: str = "cold, 2 nodes: to the first line", ours: float = 6.0, hand: float | None = 5.0, **more: Any) -> Figure:
    mine = Sample.of("slurm", [ours - 1, ours, ours + 2])
    by_hand = None if hand is None else Sample.of("script by hand", [hand, hand])
    return Figure(name, by_hand, mine, more.pop("result", mine), more.pop("bar", 7.5), **more)


def part(*figures: Figure, benchmark: str = "cold", **machine: Any) -> Part:
    facts = {"cpus": 2, "ray": "2.60.0", "slurm": "22.05.8", **machine}
    return Part("2026-01-01 10:00 UTC", facts, {}, (Measured(benchmark, 12.3, figures),))


def results(*figures: Figure) -> Results:
    return Results((part(*figures),))


def test_a_file_holds_every_sample_and_is_read_back_as_it_was() -> None:
    note = Sample.of("ratio of the fastest", [1.25], "x")
    there = results(
        figure(also=(note,), others=(Sample.of("dagster-slurm", [20.0, 21.5]),)), figure("x", problem="lines are lost")
    )
    text = there.to_json()
    assert from_json(text) == there
    assert '"values": [5.0, 6.0, 8.0]' in text  # On one line: files are kept.
    assert json.loads(text)["parts"][0]["measured"][0]["figures"][0]["ratio"] == 1.2


@pytest.mark.parametrize("text", ["", "[]", '{"format": 99, "parts": []}', '{"format": 1}', '{"format": 1, "parts": [{}]}'])
def test_a_file_of_something_else_is_refused(text: str) -> None:
    with pytest.raises(ResultsError):
        from_json(text)


def test_what_is_measured_again_takes_the_place_of_what_was_and_the_rest_stays() -> None:
    warm = part(figure("session.warm: median"), benchmark="session.warm")
    both = Results().with_part(part(figure(ours=6.0))).with_part(warm)
    assert [each.benchmark for each in both.measured] == ["cold", "session.warm"]
    again = both.with_part(part(figure(ours=5.5)))
    assert [each.benchmark for each in again.measured] == ["session.warm", "cold"]
    assert again.figures[-1].ours.median == 5.5
    assert len(again.parts) == 2  # One with nothing left is dropped.


@pytest.mark.parametrize("other", [{"cpus": 4}, {"ray": "2.61.0"}, {"slurm": "24.11.5"}])
def test_parts_of_different_machines_do_not_get_into_one_file(other: dict[str, Any]) -> None:
    with pytest.raises(ResultsError, match=next(iter(other))):
        results(figure()).with_part(part(figure(), benchmark="phases", **other))


def test_a_fact_that_one_part_does_not_know_is_no_difference() -> None:
    here = Part("2026-01-01 11:00 UTC", {"cpus": 2, "ray": "2.60.0"}, {}, (Measured("import", 1.0, (figure("import"),)),))
    assert len(results(figure()).with_part(here).parts) == 2


def test_slower_seconds_are_no_loss_while_the_ratio_holds() -> None:
    found = compare(results(figure(ours=6.0, hand=5.0)), results(figure(ours=60.0, hand=50.0)))
    assert (found.losses, found.compared) == ((), 1)


@pytest.mark.parametrize(("ours", "lost"), [(6.8, False), (7.0, True)])
def test_a_ratio_is_a_loss_when_it_is_worse_by_more_than_the_tolerance(ours: float, lost: bool) -> None:
    found = compare(results(figure(tolerance=0.15)), results(figure(ours=ours, tolerance=5.0)))
    assert bool(found.losses) == lost
    if lost:
        assert found.losses == ("cold, 2 nodes: to the first line: 1.4 times by hand, was 1.2; at most 1.38 is tolerated.",)


@pytest.mark.parametrize(("ours", "lost"), [(90.0, False), (70.0, True), (400.0, False)])
def test_what_should_be_much_is_a_loss_when_it_is_little(ours: float, lost: bool) -> None:
    old, new = (figure("slurm.stdout", ours=each, hand=100.0, at_least=True, bar=1.0) for each in (100.0, ours))
    assert bool(compare(results(old), results(new)).losses) == lost


def test_lost_lines_are_a_loss_whatever_the_ratio() -> None:
    broken = figure(problem="3 lines are lost")
    assert compare(results(figure()), results(broken)).losses == ("cold, 2 nodes: to the first line: 3 lines are lost.",)
    assert compare(results(broken), results(broken)).losses == ()


def test_what_only_one_file_has_is_told_and_compared_with_nothing() -> None:
    found = compare(results(figure("a"), figure("no ratio", hand=None)), results(figure("b")))
    assert (found.losses, found.compared, found.left_out) == ((), 0, ("a", "b"))


@pytest.mark.parametrize(
    ("result", "hand", "ratio"),
    [
        (None, Sample.of("by hand", [3.0]), 2.0),
        (Sample.of("ratio of medians", [1.7], "x"), Sample.of("by hand", [3.0]), 1.7),
        (None, Sample.of("by hand", [0.0]), None),
        (None, Sample.of("by hand", [3.0], "MiB"), None),
        (None, None, None),
    ],
)
def test_a_ratio_is_of_the_same_quantity(result: Sample | None, hand: Sample | None, ratio: float | None) -> None:
    ours = Sample.of("run()", [6.0])
    assert Figure("x", hand, ours, result or ours, None).ratio == ratio


def test_a_bar_is_met_or_not_and_nothing_promised_is_nothing_missed() -> None:
    assert figure(ours=7.5).met
    assert not figure(ours=7.6).met
    assert figure(ours=7.6, at_least=True).met
    assert figure(ours=99.0, bar=None).met
    assert not figure(problem="lost").met


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_check_succeeds_fails_and_refuses_by_its_exit_status(tmp_path: Path) -> None:
    files = {
        "old": results(figure()),
        "same": results(figure(ours=6.1)),
        "worse": results(figure(ours=12.0)),
        "other": results(figure("something else")),
    }
    for name, there in files.items():
        (tmp_path / name).write_text(there.to_json())
    assert run("check", tmp_path / "old", tmp_path / "same").returncode == 0
    worse = run("check", tmp_path / "old", tmp_path / "worse")
    assert worse.returncode == 1
    assert worse.stdout.startswith("cold, 2 nodes: to the first line: 2.4 times by hand, was 1.2")
    other = run("check", tmp_path / "old", tmp_path / "other")
    assert (other.returncode, "nothing is known" in other.stderr) == (1, True)


def test_all_benchmarks_are_there_and_take_options() -> None:
    for benchmark in BENCHMARKS.values():
        assert list(inspect.signature(benchmark.load()).parameters) == ["options"] or benchmark.name.startswith("local.first")
        assert benchmark.section in SECTIONS
    assert set(DRAWN) <= set(BENCHMARKS)
    assert Options(quick=True).repeat(5) == 1
    assert Options(quick=True, runs=3).repeat(5) == 3


def test_a_report_tells_what_is_met_what_is_not_and_on_which_machine() -> None:
    peer = Sample.of("dagster-slurm 1.22.0", [20.0, 25.0])
    missed = figure("cold, 1 node: to the first line", ours=9.0, others=(peer,))
    there = results(figure(), missed, figure("cold, 4 nodes: to the first line", bar=None))
    rendered = render(there, "benchmarks/results/x.json")
    assert rendered == render(from_json(there.to_json()), "benchmarks/results/x.json")
    page = rendered.page
    assert "1 of 2 promises were met" in page
    assert "- **cold, 1 node: to the first line**: 9 s (8-11), promised ≤ 7.5 s." in page
    assert "| cold, 2 nodes: to the first line | 6 s (5-8) slurm | 5 s script by hand |  | 1.2 | ≤ 7.5 s | yes |" in page
    assert "22.5 s (20-25) dagster-slurm 1.22.0" in page
    assert "| Slurm | 22.05.8 |" in page
    assert list(rendered.charts) == ["cold.svg"]
    assert "![Ray from nothing: run() to the payload's first line](charts/cold.svg)" in page


def test_charts_of_an_older_report_do_not_stay(tmp_path: Path) -> None:
    (tmp_path / "charts").mkdir()
    (tmp_path / "charts" / "older.svg").touch()
    render(results(figure()), "x.json").write(tmp_path)
    assert sorted(path.name for path in (tmp_path / "charts").iterdir()) == ["cold.svg"]
    assert (tmp_path / "benchmarks.md").read_text().startswith("# Benchmarks")


def test_bars_are_drawn_to_one_scale_and_text_is_no_markup() -> None:
    ours, other = Sample.of("ours", [1.0, 2.0, 4.0]), Sample.of("<them> & co", [8.0])
    picture = bars("A & B", [Group("1 node", (ours, other)), Group("2 nodes", (replace(ours, values=(4.0,)),))])
    root = ElementTree.fromstring(picture)
    spaces = "{http://www.w3.org/2000/svg}"
    rects = [rect for rect in root.iter(f"{spaces}rect") if rect.get("x")]
    widths = [float(rect.get("width") or 0) for rect in rects]
    assert widths[1] == pytest.approx(4 * widths[0], rel=0.01)
    assert widths[2] == pytest.approx(2 * widths[0], rel=0.01)
    assert rects[0].get("fill") == rects[2].get("fill") != rects[1].get("fill")
    texts = [text.text for text in root.iter(f"{spaces}text")]
    assert {"A & B", "1 node", "<them> & co", "2 s", "8 s"} <= set(texts)
    assert len(list(root.iter(f"{spaces}path"))) == 1  # A whisker where values differ.


def test_phases_are_the_differences_of_stamps_and_those_of_the_second_node_are_since_the_call() -> None:
    names = [name for name, _ in PHASES]
    stamps = {name: float(at) for at, name in enumerate(names, start=1)}
    stamps.update({"submitted": 2.5, "worker's task": 4.5, "worker's ray": 7.5, "worker's raylet": 9.5, "job": 2.4})
    # A job may start before `sbatch` has ended: nothing lasts less than no time.
    first, second = figures([stamps, {**stamps, "first": 20.0}])
    assert [sample.values[0] for sample in first.also] == [1.0, 1.5, 0.0, 1.6, *[1.0] * 8]
    assert first.also[-1].values == (1.0, 9.0)
    assert first.ours.values == (12.0, 20.0)
    assert [sample.values[0] for sample in second.also] == [4.5, 7.5, 9.5, stamps["joined"]]


def test_stamps_come_from_the_record_and_from_the_processes_of_both_nodes() -> None:
    def phase(name: str, message: str, at: float) -> dict[str, Any]:
        return {"type": "phase", "phase": name, "message": message, "at": at}

    journal = [
        {"type": "start", "at": 1.0},
        phase("cluster-start", "starting the Ray cluster x on 2 nodes: c1, c2", 1.1),
        phase("cluster-start", "1/2 nodes joined", 4.0),
        phase("cluster-start", "2/2 nodes joined", 5.0),
        phase("running", "payload started (pid 7)", 5.5),
    ]
    assert from_journal(journal) == {"runtime": 1.0, "head": 4.0, "joined": 5.0, "started": 5.5}
    ray = [(2.0, "python x.pyz ray-node {}"), (2.1, "python x.pyz ray-node {}"), (3.5, "/ray/core/src/ray/raylet/raylet --a")]
    head = [*ray, (3.0, "/ray/core/src/ray/gcs/gcs_server --b")]
    found = from_processes({"c1": head, "c2": [(at + 10, command) for at, command in ray], "g1": []}, ["c1", "c2"])
    assert found == {"ray": 2.0, "gcs": 3.0, "raylet": 3.5, "worker's ray": 12.0, "worker's raylet": 13.5}
