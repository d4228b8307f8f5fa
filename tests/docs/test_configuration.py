"""The page of fields is what the fields themselves say."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_of_fields_is_up_to_date() -> None:
    page = runpy.run_path(str(ROOT / "scripts" / "configuration.py"))["page"]()
    assert (ROOT / "docs" / "configuration.md").read_text() == page, (
        "run: python scripts/configuration.py > docs/configuration.md"
    )
