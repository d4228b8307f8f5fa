"""The site is built strictly, has every page in its navigation, and tells of every field, key, variable and message."""

import inspect
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from dagster_rayslurm import (
    RayLauncher,
    SlurmQueueConfig,
    SlurmResource,
    SSHConnectionResource,
    UvEnvironment,
    launchers,
)
from dagster_rayslurm.compute_fields import ComputeFields
from dagster_rayslurm.environments import check
from dagster_rayslurm.errors import FailureKind
from dagster_rayslurm.failures import CompletedRun, RunFailure
from dagster_rayslurm.follow import follower
from dagster_rayslurm.outcome import verdict
from dagster_rayslurm.slurm import pending, refusals, states
from dagster_rayslurm.ssh import errors as ssh_errors

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PACKAGE = ROOT / "dagster_rayslurm"
MESSAGES = runpy.run_path(str(ROOT / "scripts" / "messages.py"))
TROUBLES = " ".join((DOCS / "troubleshooting.md").read_text().split())


class Settings(yaml.SafeLoader):
    """Reads mkdocs.yml, whose tags name Python objects."""


Settings.add_multi_constructor("tag:yaml.org,2002:python/name:", lambda _loader, name, _node: name)


def settings() -> dict[str, Any]:
    found: dict[str, Any] = yaml.load((ROOT / "mkdocs.yml").read_text(), Settings)
    return found


def pages(entries: list[Any]) -> list[str]:
    """The pages of a navigation, in order, without links to elsewhere."""
    found = []
    for entry in entries:
        (below,) = entry.values()
        found += [below] if isinstance(below, str) else pages(below)
    return [page for page in found if not page.startswith("https:")]


def test_every_page_is_in_the_navigation_once() -> None:
    assert sorted(pages(settings()["nav"])) == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    """Every link within it, and every anchor, leads somewhere."""
    shutil.copytree(DOCS, tmp_path / "docs")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    said = subprocess.run(
        [Path(sys.executable).with_name("zensical"), "build", "--strict"], cwd=tmp_path, capture_output=True, text=True
    )
    assert said.returncode == 0, said.stdout + said.stderr
    links = runpy.run_path(str(ROOT / "scripts" / "docs_links.py"))
    assert not links["problems_within"](tmp_path / "site", links["read"](tmp_path / "site"))
    # A name that mkdocstrings cannot find would leave an empty page.
    reference = (tmp_path / "site" / "reference" / "python" / "index.html").read_text()
    assert "payload_path" in reference
    members = {*(each for each in dir(CompletedRun) if each[0] != "_"), "cluster_id", "job_id", "outputs"}
    assert {each for each in members if f'CompletedRun.{each}"' in reference} == members
    fields = (tmp_path / "site" / "reference" / "classes" / "index.html").read_text()
    configured = (ComputeFields, SlurmResource, SlurmQueueConfig, SSHConnectionResource, RayLauncher, UvEnvironment)
    for each in configured:
        headings = re.findall(rf'<h3 id="{re.escape(each.__module__)}\.{each.__name__}\.(\w+)"', fields)
        assert sorted({*headings} - {"from_env"}) == sorted(each.model_fields), each
        assert len(headings) == len({*headings}), each


def test_links_to_the_repository_lead_somewhere() -> None:
    blob = settings()["repo_url"] + "/blob/main/"
    texts = [path.read_text() for path in (ROOT / "mkdocs.yml", *DOCS.rglob("*.md"))]
    named = {name for text in texts for name in re.findall(re.escape(blob) + r"([^)#\s]+)", text)}
    assert named and all((ROOT / name).exists() for name in named), named


def test_the_page_of_commands_is_up_to_date() -> None:
    page = runpy.run_path(str(ROOT / "scripts" / "commands.py"))["page"]()
    assert (DOCS / "reference" / "command-line.md").read_text() == page, (
        "run: python scripts/commands.py > docs/reference/command-line.md"
    )


def test_the_page_of_messages_is_up_to_date() -> None:
    page = MESSAGES["page"]()
    assert (DOCS / "reference" / "messages.md").read_text() == page, (
        "a message is new or has changed; run: python scripts/messages.py > docs/reference/messages.md"
    )
    assert "| … has no cluster | add a table [clusters.NAME] with the fields of ComputeResource |" in page


def test_every_message_has_a_remedy() -> None:
    """In itself or in scripts/remedies.py, which has no other messages."""
    remedies = {text: MESSAGES["wrong_and_remedy"](text)[1] for area in MESSAGES["messages"]().values() for text in area}
    assert MESSAGES["REMEDIES"].keys() <= remedies.keys(), "remove remedies of messages that are gone from scripts/remedies.py"
    statement = re.compile("|((an?|did|its?|none|nothing was|running|somebody|the|there|they|what) |[A-Z`…]).*")
    advice = "write what to do about new or changed messages in scripts/remedies.py"
    assert not {text for text, remedy in remedies.items() if statement.fullmatch(remedy)}, advice


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ('raise ValueError(f"{name}: there is no disk {disk!r}; buy one")', "…: there is no disk …; buy one"),
        ('raise OSError("the disk %s is %.1f GiB too small, 100 %%" % (a, b))', "the disk … is … GiB too small, 100 %"),
        ('raise RunFailure(kind, "the disk " + name + " is full")', "the disk … is full"),
        ('raise failed(connection, sentence="the disk is gone")', "the disk is gone"),
        ('raise click.ClickException("the disk "\n    "is gone")', "the disk is gone"),
        ('return DiskError(f"the disk {name} is gone")', "the disk … is gone"),
        ('problem = StartError(kind, "the disk is gone")', "the disk is gone"),
        ('return Verdict(kind, "the disk is gone", retry=True)', "the disk is gone"),
        ('GONE = "the disk is gone"; raise click.ClickException(GONE)', "the disk is gone"),
        ('sentence = f"{name}: the disk is gone"; raise StartError(kind, sentence)', "…: the disk is gone"),
        ('what = "the disk is gone"; raise StartError(kind, f"{what}; buy {another}")', "the disk is gone; buy …"),
        ('what = "the disk is gone" if name else ""; raise StartError(kind, f"{what} at {place}")', None),
        ('what = "the disk is gone"; what += place; raise StartError(kind, what)', "the disk is gone…"),
        ("raise ValueError(text)", None),
        ("raise KeyError('disk')", None),
    ],
)
def test_a_new_message_is_found(tmp_path: Path, code: str, message: str | None) -> None:
    (tmp_path / "cli").mkdir()
    (tmp_path / "cli" / "disk.py").write_text(f"def check():\n    if bad:\n        {code}\n")
    assert MESSAGES["messages"](tmp_path) == ({"Commands": [message]} if message else {})


def test_a_variable_has_the_texts_of_all_branches_that_lead_to_the_message(tmp_path: Path) -> None:
    (tmp_path / "disk.py").write_text("""def check(bad, full):
    if bad:
        what = "the disk is gone"
        raise ValueError(what)
    elif full:
        what = "the disk is full"
    else:
        what, retry = "the disk is slow", False
    try:
        raise ValueError(what)
    except OSError:
        log.warning(f"[rayslurm] {what} at {place}")
""")
    full_or_slow = ["the disk is full", "the disk is slow"]
    assert MESSAGES["messages"](tmp_path) == {
        "Configuration": ["the disk is full", "the disk is gone", "the disk is slow"],
        "Warnings": [f"{each} at …" for each in full_or_slow],
    }


def test_the_quickstart_is_short() -> None:
    assert len((DOCS / "start" / "quickstart.md").read_text().split()) < 200


def test_every_public_class_and_field_has_its_entry() -> None:
    import dagster_rayslurm

    python, fields = (DOCS / "reference" / "python.md").read_text(), (DOCS / "configuration.md").read_text()
    classes = (DOCS / "reference" / "classes.md").read_text()
    for name in dagster_rayslurm.__all__:
        if name == "__version__":
            continue
        public = getattr(dagster_rayslurm, name)
        configured = isinstance(public, type) and issubclass(public, BaseModel) and public is not launchers.Launcher
        if not configured:
            assert f"::: {public.__module__}.{name}\n" in python, name
            continue
        section = fields.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        if name in dagster_rayslurm._COMPONENTS:
            section = (DOCS / "dg.md").read_text()
        elif name != "ComputeResource":
            assert f"::: {public.__module__}.{name}\n" in classes, name
        for field in set(public.model_fields) - {"kind"}:
            row = rf"^\| [^|]*`{field}`[^|]* \|"
            assert re.search(row, section, re.MULTILINE), f"{name}.{field}"


def test_every_key_of_metadata_is_explained() -> None:
    setting = re.compile(r'\b(?:metadata|texts)\["([^"]+)"\]|\badd\("([^"]+)"|"([A-Z][a-z]+(?: [\w%()]+)+)": ')
    places = [*(PACKAGE / "backends").rglob("*.py"), *(PACKAGE / "execution").glob("*.py"), PACKAGE / "failures.py"]
    texts = [path.read_text() for path in (*places, PACKAGE / "outcome" / "metadata.py")]
    keys = {next(filter(None, found)) for text in texts for found in setting.findall(text)}
    told = set(re.findall(r"`([^`]+)`", (DOCS / "figures.md").read_text()))
    assert {"Peak memory (MiB)", "Queue wait (s)", "Node hours", "Last output", "Failure kind"} <= keys
    assert not keys - told


def test_every_variable_is_explained() -> None:
    private = {"RAYSLURM_NODE_LOCAL", "RAYSLURM_PARENT", "RAYSLURM_SCRATCH_LOCK"}
    named = {name for path in PACKAGE.rglob("*.py") for name in re.findall(r'"(RAYSLURM_[A-Z_]+[A-Z])"', path.read_text())}
    page = (DOCS / "reference" / "variables.md").read_text()
    assert named > private
    assert not {name for name in named - private if f"`{name}`" not in page}


def first_clause(sentence: str) -> str:
    """The longest text between placeholders in the part of a sentence that says what is wrong."""
    chunks = re.split(r"\{[^}]*\}", re.split(r"; |: |, which", sentence)[0])
    return max(chunks, key=len).strip(" ,.;:()")


def messages() -> list[str]:
    """The sentences, with placeholders, from which messages for users are made."""
    found = [sentence for _, sentence in (*refusals._ADVICE, *pending._NEVER)]
    found += [sentence for _, sentence in verdict._ENDS.values()]
    found += check._PROBLEMS.values()
    found += states.LOST_NODES.values()
    for each in vars(ssh_errors).values():
        if callable(each) and getattr(each, "__name__", "") == "make":
            found.append(inspect.getclosurevars(each).nonlocals["sentence"])
    return found


@pytest.mark.parametrize("kind", FailureKind)
def test_a_failure_links_to_the_section_of_its_kind(kind: FailureKind) -> None:
    page, _, heading = str(RunFailure(kind, "x").metadata["Troubleshooting"].value).partition("#")
    name = page.removeprefix(settings()["repo_url"] + "/blob/main/")
    assert f"\n## {heading}\n" in (ROOT / name).read_text()


def test_every_phase_that_is_a_warning_is_on_that_page() -> None:
    assert all(f"| `{phase}: " in TROUBLES for phase in follower.WARNING_PHASES)


@pytest.mark.parametrize("sentence", dict.fromkeys(map(first_clause, messages())))
def test_every_message_is_on_the_page_of_troubles(sentence: str) -> None:
    assert len(sentence) > 7, sentence
    assert sentence in TROUBLES
