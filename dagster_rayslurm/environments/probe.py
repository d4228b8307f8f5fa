"""What a Python says of its environment without importing Ray; the text of this file is what it is given with `-c`.

It runs in any Python, so that one that is too old can say so.
"""

import json
import os
import sys


def version(module, distribution):  # type: (str, str) -> object
    """The version of what can be imported: "" if it does not say, None if it is not there."""
    from importlib import metadata, util

    spec = util.find_spec(module)
    if spec is None or spec.origin is None:  # Nothing, or a directory that has nothing but the name.
        return None
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def main():  # type: () -> None
    """Write the answer to descriptor 3, and after it the paths whose change makes it void, each on a line."""
    if sys.path[:1] == [""]:
        del sys.path[0]  # The current directory, which is not the environment's.
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
