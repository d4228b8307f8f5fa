"""Build the site of one version beside those of others: `make docs-version VERSION=x.y`.

The directory is as mike makes it, which themes of mkdocs-material and zensical read: a directory for each version, a copy of the
newest release as `latest`, versions.json for the selector in the header, and an index.html that leads to `latest`.
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LATEST, DEV = "latest", "dev"
INDEX = f"""<!doctype html>
<meta charset="utf-8">
<title>dagster-rayslurm</title>
<meta http-equiv="refresh" content="0; url={LATEST}/">
<a href="{LATEST}/">The newest version</a>
"""


def order(version: str) -> tuple[int, ...]:
    """What versions are sorted by: releases as numbers, below `dev`. Raises ValueError for other names."""
    if version == DEV:
        return (sys.maxsize,)
    if not re.fullmatch(r"[0-9]+\.[0-9]+", version):
        raise ValueError(f"VERSION={version!r} is neither x.y, such as 0.2, nor {DEV}")
    return tuple(map(int, version.split(".")))


def with_version(known: list[dict[str, Any]], version: str) -> list[dict[str, Any]]:
    """What versions.json lists after a version is built: newest first, and the newest release is `latest`."""
    names = sorted({version, *(each["version"] for each in known)}, key=order, reverse=True)
    latest = next((name for name in names if name != DEV), DEV)
    titles = {each["version"]: each["title"] for each in known}
    return [{"version": name, "title": titles.get(name, name), "aliases": [LATEST] if name == latest else []} for name in names]


def read_versions(into: Path) -> list[dict[str, Any]]:
    """What versions.json lists; nothing without one. Raises ValueError if it is not as this script writes it."""
    path = into / "versions.json"
    try:
        known = json.loads(path.read_text())
        assert all(order(each["version"]) and each["title"] for each in known)
    except FileNotFoundError:
        return []
    except (AssertionError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} lists no versions of this site ({error}); mend or remove it") from None
    return list(known)


def build(version: str, into: Path) -> None:
    """Build the site of the working tree into a directory, in place of an older one of the same version."""
    versions = with_version(read_versions(into), version)
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=into, prefix=".") as scratch:
        # A project of its own, as zensical reads nothing outside the directory of its configuration.
        shutil.copytree(ROOT / "docs", Path(scratch, "docs"))
        shutil.copy(ROOT / "mkdocs.yml", Path(scratch, "inherited.yml"))
        config = Path(scratch, "mkdocs.yml")
        config.write_text(f"INHERIT: inherited.yml\nextra: {{version: {{provider: mike, default: {LATEST}}}}}\n")
        zensical = Path(sys.executable).with_name("zensical")
        if (code := subprocess.run([zensical, "build", "--strict"], cwd=scratch).returncode) != 0:
            raise ValueError(f"the site is not built: zensical ended with exit code {code}")
        for name in (version, *(LATEST for each in versions if each["version"] == version and each["aliases"])):
            shutil.rmtree(into / name, ignore_errors=True)
            shutil.copytree(f"{scratch}/site", into / name)
    (into / "versions.json").write_text(json.dumps(versions, indent=2) + "\n")
    (into / "index.html").write_text(INDEX)
    (into / ".nojekyll").touch()


def main(version: str, into: Path) -> None:
    """Build a version, and say what there is."""
    try:
        order(version)
        build(version, into)
    except ValueError as error:
        raise SystemExit(f"Error: {error}") from None
    listed = ", ".join(" = ".join([each["version"], *each["aliases"]]) for each in read_versions(into))
    print(f"{into}: {listed}. Look at it with `python -m http.server --directory {into}`.")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
