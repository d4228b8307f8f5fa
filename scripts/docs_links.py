"""Check the links of the built site: `make docs-links`. Those within the site, with their anchors, and those to elsewhere.

A server elsewhere that cannot be reached counts as not checked, not as wrong, so that the check is of use without a network.
"""

import http.client
import sys
import urllib.error
import urllib.request
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

SITE = "http://site.invalid/"  # Where the pages are while links between them are resolved.
PATIENCE = 20  # Seconds for one answer from elsewhere.
_REFUSALS = (401, 403, 405, 429, 501)  # Answers to programs, at addresses that browsers may well open.


@dataclass
class Page(HTMLParser):
    """One page: where it leads, and the anchors that it has."""

    text: str
    links: set[str] = field(default_factory=set)
    anchors: set[str] = field(default_factory=lambda: {"", "top"})

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect what one tag names; called by `feed`."""
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        # A hint to connect early (`preconnect`) is no page.
        if tag != "link" or values.get("rel") != "preconnect":
            self.links |= {values[name].strip() for name in ("href", "src") if name in values}


def read(site: Path) -> dict[str, Page]:
    """The pages of a built site, by address."""
    return {SITE + path.relative_to(site).as_posix(): Page(path.read_text()) for path in sorted(site.rglob("*.html"))}


def problems_within(site: Path, pages: dict[str, Page]) -> list[str]:
    """One sentence for each link within the site that leads nowhere."""
    found = []
    for address, page in pages.items():
        for link in sorted(page.links):
            target, anchor = urldefrag(urljoin(address, link))
            if not target.startswith(SITE):
                continue
            path = site / unquote(urlsplit(target).path).lstrip("/")
            path = path / "index.html" if path.is_dir() else path
            there = pages.get(SITE + path.relative_to(site).as_posix())
            name = address.removeprefix(SITE)
            if not path.exists():
                found.append(f"{name}: {link} leads to no file")
            elif there and unquote(anchor) not in there.anchors:
                found.append(f"{name}: {link} leads to a page without this anchor")
    return found


def elsewhere(pages: dict[str, Page]) -> dict[str, str]:
    """The addresses outside the site, and the first page that names each."""
    found: dict[str, str] = {}
    for address, page in pages.items():
        for link in page.links:
            if link.startswith(("http:", "https:")):
                found.setdefault(urldefrag(link)[0], address.removeprefix(SITE))
    return found


def ask(address: str) -> str:
    """What an address answers: "ok", "wrong: …" or "not checked: …"."""
    for method in ("HEAD", "GET"):
        try:
            request = urllib.request.Request(address, method=method, headers={"User-Agent": "Mozilla/5.0 (docs-links)"})
            with urllib.request.urlopen(request, timeout=PATIENCE):
                return "ok"
        except urllib.error.HTTPError as error:
            if error.code not in _REFUSALS and (method == "GET" or error.code >= 500):
                return f"not checked: HTTP {error.code}" if error.code >= 500 else f"wrong: HTTP {error.code}"
            said = f"not checked: HTTP {error.code}"
        except (OSError, http.client.HTTPException) as error:
            return f"not checked: {getattr(error, 'reason', error)}"
        except ValueError as error:
            return f"wrong: {error}"
    return said


def main(site: Path) -> int:
    """Print what is wrong and what could not be checked; the exit code."""
    if not (site / "index.html").exists():
        print(f"Error: there is no site in {site}; build it with `make docs`", file=sys.stderr)
        return 2
    pages = read(site)
    wrong = problems_within(site, pages)
    asked = elsewhere(pages)
    with ThreadPoolExecutor(8) as pool:
        answers = dict(zip(asked, pool.map(ask, asked), strict=True))
    unchecked: dict[str, list[str]] = defaultdict(list)
    for address, answer in sorted(answers.items()):
        verdict, _, reason = answer.partition(": ")
        if verdict == "wrong":
            wrong.append(f"{asked[address]}: {address} answers with {reason}")
        elif verdict == "not checked":
            unchecked[reason].append(address)
    print(*wrong, sep="\n", end="\n" * bool(wrong))
    for reason, addresses in unchecked.items():
        print(f"not checked ({reason}):", *addresses, sep="\n  ")
    links = sum(len(page.links) for page in pages.values())
    away = sum(map(len, unchecked.values()))
    print(f"{len(pages)} pages, {links} links, {len(asked)} of them to elsewhere: {len(wrong)} wrong, {away} not checked")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main(Path(*sys.argv[1:2] or ["site"])))
