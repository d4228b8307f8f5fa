"""Plans, names and metadata: pure functions."""

import base64
import os
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dagster_rayslurm.errors import FailureKind
from dagster_rayslurm.follow import Evidence
from dagster_rayslurm.outcome.metadata import failure_metadata, run_metadata
from dagster_rayslurm.outcome.pictures import usage_chart
from dagster_rayslurm.outcome.verdict import Judged, Verdict
from dagster_rayslurm.plan import existing_files, parse_payload, run_dir_name
from dagster_rayslurm.separate.together import failures_metadata
from dagster_rayslurm.slurm.accounting import JobFacts

END: dict[str, Any] = {
    "context": {
        "hostname": "n1",
        "num_cpus": 4,
        "warm": True,
        "ray_version": "2.60.0",
        "bring_up": 3.21,
        "dashboard_url": "http://127.0.0.1:1",
        "nodes": [
            {"hostname": "n1", "address": "10.0.0.1", "head": True, "resources": {"CPU": 4.0, "GPU": 1.0, "memory": 2.0**30}}
        ],
    },
    "usage": {
        "elapsed": 10.0,
        "cpu_seconds": 20.0,
        "peak_memory": 2**30,
        "gpu_utilization_mean": 40.0,
        "gpu_utilization_max": 90.0,
        "gpu_memory_max": 2**31,
        "spilled_bytes": 2**20,
        "points": [[1.0, 2.0, 3.0], [2.0, 4.0, 9.0]],
    },
    "outputs_left_out": ["x"],
    "stdio_dropped": 5,
    "exit_code": 1,
    "signal": None,
}


def test_simulated_cpus_are_not_part_of_the_efficiency() -> None:
    """20 CPU seconds in 10 s are all that 2 CPUs have, whatever number Ray was told."""
    on_two = {**END, "context": {**END["context"], "machine_cpus": 2}}
    assert run_metadata(on_two, "local", "c1")["CPU efficiency (%)"] == 100.0


def test_metadata_tells_what_was_used() -> None:
    metadata = run_metadata(END, "local", "c1")
    assert metadata["CPU efficiency (%)"] == 50.0 and metadata["Peak memory (MiB)"] == 1024.0
    assert metadata["GPU utilization mean (%)"] == 40.0 and metadata["GPU memory max (MiB)"] == 2048.0
    assert metadata["Object store spilled (MiB)"] == 1.0 and metadata["Output not recorded (characters)"] == 5
    assert metadata["Nodes"].records[0].data["GPUs"] == 1.0 and "Slurm job ID" not in metadata
    dg.MaterializeResult(metadata=metadata)  # Dagster takes all of it.


def test_metadata_of_a_run_that_never_started_its_payload() -> None:
    assert run_metadata({"context": {}, "usage": {}, "outputs_left_out": []}, "local", "c")["Execution mode"] == "local"


def test_a_failure_shows_text_in_place_and_its_cause_first() -> None:
    evidence = Evidence(end=END, tails={"raylet.err": "\x1b[31mboom\x1b[0m\n"}, runtime_log="log")
    evidence.last_output.append(("stdout", "".join(f"line {number} {40 * chr(45)}\n" for number in range(500))))
    metadata = failure_metadata(evidence, "/run")
    assert list(metadata) == ["Last output", "Log: raylet.err", "Runtime log", "Run directory", "Exit code"]
    last = metadata["Last output"]
    assert isinstance(last, dg.TextMetadataValue) and last.text is not None and len(last.text) <= 1000
    assert last.text.startswith("…\nline 4") and "\nline 499 --" in last.text
    assert metadata["Log: raylet.err"].value == "boom" and metadata["Exit code"] == 1
    assert "Run directory" not in failure_metadata(evidence, None)


@pytest.mark.parametrize(
    ("names", "path"),
    [(["ray-logs-c1.tar.gz"], "ray-logs-c1.tar.gz"), (["ray-logs-c1.tar.gz", "ray-logs-c2.tar.gz"], "ray-logs-*.tar.gz")],
)
def test_a_failure_says_where_the_logs_of_ray_are(names: list[str], path: str) -> None:
    evidence = Evidence(end={**END, "reason": "exit", "context": {**END["context"], "ray_logs": names}})
    assert failure_metadata(evidence, "dev@edge:22:/run")["Ray logs"].value == f"dev@edge:22:/run/{path}"
    assert "Ray logs" not in failure_metadata(evidence, None) and "Ray logs" not in failure_metadata(Evidence(end=END), "/run")
    judged = {"cpu": Judged(Verdict(FailureKind.PAYLOAD, "it failed"), evidence)}
    assert failures_metadata(judged, "/run")["Ray logs (cpu)"].value == f"/run/components/cpu/{path}"


def picture(chart: str) -> str:
    """The SVG in the Markdown, which is one that can be parsed."""
    svg = base64.b64decode(chart.rpartition("base64,")[2][:-1]).decode()
    assert ElementTree.fromstring(svg).tag.endswith("svg")
    return svg


def usage_of(points: list[list[float]], **others: Any) -> dict[str, Any]:
    return {**END["usage"], "points": points, "peak_memory": int(max(point[2] for point in points)), **others}


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e4), st.floats(0, 1e13)), min_size=2, max_size=50))
def test_the_chart_is_a_picture(points: list[tuple[float, float, float]]) -> None:
    chart = usage_chart(usage_of([list(point) for point in sorted(points)]))
    picture(chart)
    assert len(chart) < 1000


@pytest.mark.parametrize("count", [2, 3, 8, 64, 128, 1000])
def test_dagster_shows_the_chart_in_place(count: int) -> None:
    points = [[place * 97.3, (place * 7919) % 640 / 10, (place * 104729) % 2**40] for place in range(1, count + 1)]
    usage = usage_of([list(map(float, point)) for point in points], nodes={"n1": {}, "n2": {}}, cpu_seconds=1e6)
    chart = usage_chart(usage, cpus=12800.0, memory=2.0**40)
    assert len(chart) < 1000
    assert len(re.findall("[ -]", picture(chart))) > 2 * min(count, 12)  # It still has its points.


def test_the_chart_tells_what_the_table_tells() -> None:
    """A short peak between samples counts, and the grant is a line above both."""
    points = [[float(second), 1.0, 50 * 2.0**20] for second in range(1, 200)]
    points[77][2] = 70 * 2.0**20
    nodes = {"n1": {"cpu_seconds": 100.0, "peak_memory": 20 * 2**20}, "n2": {"cpu_seconds": 100.0, "peak_memory": 80 * 2**20}}
    usage = usage_of(points, elapsed=200.0, cpu_seconds=200.0, peak_memory=80 * 2**20, nodes=nodes)
    context = {**END["context"], "granted": [granted("n1", 500), granted("n2", 160)]}
    metadata = run_metadata({**END, "usage": usage, "context": context}, "slurm", "c1")
    svg = picture(metadata["Usage"].value)
    assert metadata["Peak memory (MiB)"] == 80.0 and "memory on the largest node: up to 80 of 160 MiB" in svg
    assert "CPUs busy on all nodes: 1.0 of 4 on average" in svg and "dashes: granted" in svg
    alone = picture(usage_chart(usage_of(points)))
    assert "granted" not in alone and "node" not in alone


def granted(name: str, mib: int | None, gpus: int = 0, component: str | None = None) -> dict[str, Any]:
    limit = None if mib is None else mib * 2**20
    return {
        "hostname": name,
        "num_cpus": 2,
        "num_gpus": gpus,
        "memory": 2**40,
        "memory_limit": limit,
        "component": component,
    }


def test_what_was_granted_stands_beside_what_was_used() -> None:
    nodes = {"n1": {"cpu_seconds": 900.0, "peak_memory": 50 * 2**20}, "n2": {"cpu_seconds": 0.0, "peak_memory": 100 * 2**20}}
    usage = {**END["usage"], "elapsed": 1790.0, "cpu_seconds": 895.0, "peak_memory": 100 * 2**20, "nodes": nodes}
    context = {**END["context"], "warm": False, "bring_up": 10.0, "granted": [granted("n1", 500, 1), granted("n2", 400)]}
    metadata = run_metadata({**END, "usage": usage, "context": context}, "slurm", "c1")
    assert metadata["Granted and used"] == "granted 4 CPUs, 400 MiB on n2, 1 GPU; used 0.5 CPUs, 100 MiB"
    assert metadata["Memory efficiency (%)"] == 25.0 and metadata["CPU efficiency (%)"] == 12.5
    # The bring-up of a cluster of its own is held, too.
    assert (metadata["Node hours"], metadata["CPU hours"], metadata["GPU hours"]) == (1.0, 2.0, 0.5)
    warm = run_metadata({**END, "usage": usage, "context": {**context, "warm": True}}, "slurm-session", "c1")
    assert warm["Node hours"] == 0.994 and "Usage measured on" not in warm
    # Slurm's grant, of which Ray schedules a part.
    assert metadata["Nodes"].records[0].data["memory (GiB)"] == 0.5
    unlimited = run_metadata({**END, "context": {**context, "granted": [granted("n1", None)]}}, "slurm", "c1")
    assert unlimited["Nodes"].records[0].data["memory (GiB)"] == 1024.0
    local = run_metadata(END, "local", "c1")
    assert local["Nodes"].records[0].data["memory (GiB)"] == 1.0
    assert not {"Granted and used", "Node hours", "Memory efficiency (%)"} & set(local)


def test_energy_is_a_number_of_kilowatt_hours() -> None:
    assert "Energy (kWh)" not in run_metadata(END, "slurm", "c1")
    used = {**END, "context": {**END["context"], "energy_joules": 5_400_000_000}}
    assert run_metadata(used, "slurm", "c1")["Energy (kWh)"] == 1500.0


def test_the_command_for_a_dashboard_is_shown_as_long_as_it_lasts() -> None:
    assert run_metadata(END, "local", "c1")["Ray dashboard"] == "was there until the run ended"
    kept = {**END, "context": {**END["context"], "kept_warm": True}}
    assert run_metadata(kept, "slurm-session", "c1")["Ray dashboard"].value.startswith("`rayslurm dashboard c1`")


def test_a_run_without_an_end_has_the_figures_of_its_last_sample() -> None:
    evidence = Evidence()
    assert evidence.end_or_partial is None
    evidence.context = {**END["context"], "granted": [granted("n1", 500), granted("n2", 500)]}
    assert "Peak memory (MiB)" not in run_metadata(evidence.end_or_partial, "slurm", "c1")
    usage = {key: value for key, value in END["usage"].items() if key != "points"}
    evidence.add_record(
        {
            "type": "usage",
            "usage": {**usage, "elapsed": 2.0, "cpu_seconds": 2.0, "peak_memory": 100 * 2**20},
            "memory": 90 * 2**20,
        },
        "n",
    )
    evidence.add_record(
        {
            "type": "usage",
            "usage": {**usage, "elapsed": 4.0, "cpu_seconds": 8.0, "peak_memory": 490 * 2**20},
            "memory": 490 * 2**20,
        },
        "n",
    )
    assert evidence.usage["points"] == [[2.0, 1.0, 90 * 2**20], [4.0, 3.0, 490 * 2**20]]
    metadata = run_metadata(evidence.end_or_partial, "slurm", "c1")
    assert metadata["Peak memory (MiB)"] == 490.0 and metadata["Memory efficiency (%)"] == 98.0
    assert "up to 490 of 500 MiB" in picture(metadata["Usage"].value)
    assert metadata["Usage measured on"].startswith("n1 alone")
    evidence.end = END
    assert evidence.end_or_partial == END


@given(st.text(), st.text(min_size=8, max_size=8, alphabet="0123456789abcdef"))
def test_run_directories_have_harmless_names(step: str, run_id: str) -> None:
    name = run_dir_name(run_id, step, "n0")
    assert "/" not in name and name.startswith(run_id) and name.endswith("-n0") and len(name) < 80 and name.isascii()


@example(["'`"])  # The quotes of one kind within those of the other.
@example(['"$x'])
@given(st.lists(st.text(min_size=1).filter(lambda word: "\0" not in word), min_size=1))
def test_any_words_survive_a_shells_quoting(words: list[str]) -> None:
    import shlex

    text = shlex.join(["program", *words])
    assert parse_payload(text)[0] == ["program", *words]
    assert parse_payload(words)[0] == words


def test_a_script_wins_over_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "python -V").write_text("")
    assert parse_payload("python -V")[0] == ["python", str(tmp_path / "python -V")]


def test_files_of_one_name_cannot_stand_together(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.csv").write_text("")
    with pytest.raises(ValueError, match=r"two files are called 'x\.csv'"):
        existing_files([tmp_path / "a" / "x.csv", tmp_path / "b" / "x.csv"])
    assert existing_files([os.fspath(tmp_path / "a")]) == [str(tmp_path / "a")]


def test_metadata_of_components() -> None:
    gpu = {"hostname": "g1", "address": "10.0.0.2", "head": False, "component": "gpu", "resources": {"CPU": 2.0, "GPU": 2.0}}
    nodes = [{**END["context"]["nodes"][0], "component": "cpu"}, gpu, {**gpu, "hostname": "g2"}]
    granted = [
        {"component": "cpu", "job_id": "17+0", "partition": "compute", "nodes": ["n1"]},
        {"component": "gpu", "job_id": "17+1", "partition": "gpu", "nodes": ["g1", "g2"]},
    ]
    usage = {**END["usage"], "nodes": {name: {"cpu_seconds": 2.0, "peak_memory": 2**20} for name in ("n1", "g1", "g2")}}
    end = {**END, "usage": usage, "context": {**END["context"], "nodes": nodes, "allocation": {"components": granted}}}
    metadata = run_metadata(end, "slurm-hetjob", "c1")
    assert [row.data["component"] for row in metadata["Nodes"].records] == ["cpu", "gpu", "gpu"]
    rows = [row.data for row in metadata["Components"].records]
    assert [(row["Slurm job ID"], row["partition"], row["nodes"]) for row in rows] == [
        ("17+0", "compute", "n1"),
        ("17+1", "gpu", "g1, g2"),
    ]
    assert [(row["CPUs"], row["GPUs"], row["CPU time (s)"], row["peak memory (MiB)"]) for row in rows] == [
        (4.0, 1.0, 2.0, 1.0),
        (4.0, 4.0, 4.0, 1.0),
    ]
    # Local mode has no allocation, and two components on one host.
    here = [{**node, "hostname": "pc"} for node in nodes[:2]]
    figures = {"pc": {"cpu_seconds": 1.0, "peak_memory": 0}, "pc (component gpu)": {"cpu_seconds": 3.0, "peak_memory": 0}}
    local = {**end, "usage": {**usage, "nodes": figures}, "context": {**END["context"], "nodes": here}}
    rows = [row.data for row in run_metadata(local, "local", "c1")["Components"].records]
    assert [(row["component"], row["nodes"], row["CPU time (s)"]) for row in rows] == [("cpu", "pc", 1.0), ("gpu", "pc", 3.0)]
    assert "Slurm job ID" not in rows[0] and "Components" not in run_metadata(END, "local", "c1")


def test_metadata_of_a_heterogeneous_job_that_failed() -> None:
    parts = tuple(
        JobFacts(17 + number, state, component_id=name)
        for number, (name, state) in enumerate([("cpu", "FAILED"), ("gpu", "CANCELLED")])
    )
    facts = JobFacts(17, "CANCELLED", components=parts)
    rows = [row.data for row in failure_metadata(Evidence(job=facts), None)["Slurm components"].records]
    assert [(row["component"], row["Slurm job ID"], row["state"]) for row in rows] == [
        ("cpu", "17+0", "FAILED"),
        ("gpu", "17+1", "CANCELLED"),
    ]
