"""The scripts for the built site: links that lead nowhere are found, and versions stand beside each other."""

import json
import runpy
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
LINKS = runpy.run_path(str(SCRIPTS / "docs_links.py"))
VERSIONS = runpy.run_path(str(SCRIPTS / "docs_version.py"))


def site(directory: Path, **pages: str) -> Path:
    """A site with pages of some HTML; each is the index of a directory, and `index` the start."""
    for name, text in pages.items():
        path = directory / ("" if name == "index" else name) / "index.html"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return directory


@pytest.mark.parametrize(
    ("link", "problem"),
    [
        ("b/", None),
        ("b/#there", None),
        ("b/#%74here", None),
        ("./b/index.html#old", None),
        ("#", None),
        ("/b/", None),
        ("mailto:me@example.org", None),
        ("https://example.org/nothing", None),
        ("b/#nowhere", "leads to a page without this anchor"),
        ("#nowhere", "leads to a page without this anchor"),
        ("c/", "leads to no file"),
        ("b/picture.png", "leads to no file"),
    ],
)
def test_a_link_within_the_site(tmp_path: Path, link: str, problem: str | None) -> None:
    built = site(tmp_path, index=f'<a href="{link}">x</a>', b='<h2 id="there">x</h2><a name="old"></a>')
    found = LINKS["problems_within"](built, LINKS["read"](built))
    assert found == ([f"index.html: {link} {problem}"] if problem else [])


def test_pictures_and_scripts_are_links_as_well(tmp_path: Path) -> None:
    built = site(tmp_path, index='<img src="a.png"><script src="b.js"></script><link rel="preconnect" href="https://x.test">')
    assert [each.split()[1] for each in LINKS["problems_within"](built, LINKS["read"](built))] == ["a.png", "b.js"]
    assert LINKS["elsewhere"](LINKS["read"](built)) == {}


class Answers(BaseHTTPRequestHandler):
    """Answers with the code that is the path; those above 1000 to HEAD alone."""

    def do_HEAD(self) -> None:
        code = int(self.path[1:])
        self.send_response(code - 1000 if code > 1000 else code)
        self.end_headers()

    def do_GET(self) -> None:
        code = int(self.path[1:])
        self.send_response(200 if code > 1000 else code)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Answers) as started:
        thread = threading.Thread(target=started.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{started.server_port}/"
        started.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        (200, "ok"),
        (404, "wrong: HTTP 404"),
        (410, "wrong: HTTP 410"),
        (1404, "ok"),
        (1405, "ok"),
        (403, "not checked: HTTP 403"),
        (503, "not checked: HTTP 503"),
    ],
)
def test_an_answer_from_elsewhere(server: str, code: int, answer: str) -> None:
    assert LINKS["ask"](f"{server}{code}") == answer


def test_what_cannot_be_reached_is_no_error(tmp_path: Path, server: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:  # It listens to nobody, so that connections to it are refused.
        taken.bind(("127.0.0.1", 0))
        away = f"http://127.0.0.1:{taken.getsockname()[1]}/"
        built = site(tmp_path, index=f'<a href="{away}">x</a><a href="{server}200">y</a>')
        assert LINKS["main"](built) == 0
        said = capsys.readouterr().out
        assert "refused" in said and f"\n  {away}\n" in said and "2 of them to elsewhere: 0 wrong, 1 not checked" in said
    site(tmp_path, index=f'<a href="{server}404#x">y</a>')
    assert LINKS["main"](built) == 1
    assert f"index.html: {server}404 answers with HTTP 404\n" in capsys.readouterr().out


def test_without_a_site_there_is_nothing_to_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert LINKS["main"](tmp_path) == 2
    assert "build it with `make docs`" in capsys.readouterr().err


def listed(*names: str) -> list[tuple[str, list[str]]]:
    """What versions.json has after versions were built in an order."""
    known: list[dict[str, Any]] = []
    for name in names:
        known = VERSIONS["with_version"](known, name)
    return [(each["version"], each["aliases"]) for each in known]


def test_the_newest_release_is_latest_in_whatever_order_they_are_built() -> None:
    assert listed("0.9", "0.10") == listed("0.10", "0.9", "0.10") == [("0.10", ["latest"]), ("0.9", [])]
    assert listed("dev") == [("dev", ["latest"])]
    assert listed("dev", "0.1") == listed("0.1", "dev") == [("dev", []), ("0.1", ["latest"])]


def test_titles_that_were_written_by_hand_stay() -> None:
    known = [{"version": "0.1", "title": "0.1 (old)", "aliases": ["latest"]}]
    assert [each["title"] for each in VERSIONS["with_version"](known, "0.2")] == ["0.2", "0.1 (old)"]


@pytest.mark.parametrize("name", ["", "1", "0.1.2", "v0.2", "../0.2", "0.2\n", "latest"])
def test_other_names_are_refused_before_anything_is_built(name: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"Error: VERSION=.* is neither x\.y, such as 0\.2, nor dev"):
        VERSIONS["main"](name, tmp_path / "into")
    assert not (tmp_path / "into").exists()


@pytest.mark.parametrize("text", ["{", "[1]", '[{"version": "x"}]', '{"version": "0.1"}'])
def test_a_list_of_versions_that_is_not_ours_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "versions.json").write_text(text)
    with pytest.raises(SystemExit, match=r"versions\.json lists no versions of this site .*; mend or remove it"):
        VERSIONS["main"]("0.1", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["versions.json"]


def test_a_version_is_built_beside_an_older_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "versions.json").write_text('[{"version": "0.1", "title": "0.1", "aliases": ["latest"]}]')
    for name in ("0.1", "latest", "0.2"):
        site(tmp_path, **{name: "old"})
    VERSIONS["main"]("0.2", tmp_path)
    assert f"{tmp_path}: 0.2 = latest, 0.1. " in capsys.readouterr().out
    assert (tmp_path / "0.1" / "index.html").read_text() == "old" and 'url=latest/"' in (tmp_path / "index.html").read_text()
    for name in ("0.2", "latest"):
        text = (tmp_path / name / "index.html").read_text()
        assert json.loads(text.partition('id="__config" type="application/json">')[2].partition("<")[0])["version"] == {
            "provider": "mike",
            "default": "latest",
        }
    assert {path.name for path in tmp_path.iterdir()} == {".nojekyll", "0.1", "0.2", "index.html", "latest", "versions.json"}
