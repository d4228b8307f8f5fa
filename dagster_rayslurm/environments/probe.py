"""Report the versions of Python, Ray and Dagster Pipes in an environment, without importing them.

The text of this file is passed to the environment's Python with `-c`. It runs in every Python, even one that is too old.
"""

import json
import os
import sys


def version(module, distribution):  # type: (str, str) -> object
    """The version of a module, by the name of its distribution; "" if unknown, None if the module does not exist."""
    from importlib import metadata, util

    spec = util.find_spec(module)
    if spec is None or spec.origin is None:  # Not found, or only a directory with that name.
        return None
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def main():  # type: () -> None
    """Write to file descriptor 3: a line with the versions as JSON, then one line for each path whose change outdates them."""
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
