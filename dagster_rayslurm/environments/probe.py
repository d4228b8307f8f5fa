"""Report the versions of Python, Ray and Dagster Pipes in an environment, without importing them.

The text of this file is passed to Python with `-c`. Any Python can run it, so that one that is too old can say so.
"""

import json
import os
import sys


def version(module, distribution):  # type: (str, str) -> object
    """The version of a module that can be imported: "" if unknown, None if it does not exist."""
    from importlib import metadata, util

    spec = util.find_spec(module)
    if spec is None or spec.origin is None:  # Not found, or only a directory with that name.
        return None
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def main():  # type: () -> None
    """Write the versions to descriptor 3, then one per line the paths whose change invalidates them."""
    if sys.path[:1] == [""]:
        del sys.path[0]  # The current directory is not part of the environment.
    facts = {"python": list(sys.version_info[:3])}  # type: dict[str, object]
    paths = []
    if sys.version_info >= (3, 8):
        facts["ray"] = version("ray", "ray")
        facts["pipes"] = version("dagster_pipes", "dagster-pipes")
        places = [sys.executable, os.path.realpath(sys.executable), os.path.join(sys.prefix, "pyvenv.cfg")] + sys.path
        paths = [os.fsencode(path) for path in places if "\n" not in path]
    os.write(3, b"\n".join([json.dumps(facts).encode("ascii")] + paths + [b""]))


if __name__ == "__main__":
    main()
