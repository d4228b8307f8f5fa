"""Run tasks with a package from the index and a module of a directory, neither of which the payload itself has."""

import importlib.util
from pathlib import Path

import ray
from dagster_pipes import open_dagster_pipes


@ray.remote
def in_words(size: int) -> str:
    """A size in words."""
    import humanize  # Of `pip`.
    from rounding import to_thousands  # Of `working_dir`.

    return humanize.naturalsize(to_thousands(size))


if __name__ == "__main__":
    with open_dagster_pipes() as pipes:
        library = Path(__file__).parent / "library"
        ray.init(runtime_env={"working_dir": str(library), "pip": ["humanize==4.13.0"]})
        words = ray.get([in_words.remote(size) for size in (999, 123_456, 7_890_123)])
        here = [name for name in ("humanize", "rounding") if importlib.util.find_spec(name)]
        pipes.report_asset_materialization(metadata={"sizes": ", ".join(words), "in the payload's own Python": str(here)})
