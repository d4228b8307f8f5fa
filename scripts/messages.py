"""Render the page of all messages from the code: `python scripts/messages.py > docs/reference/messages.md`."""

import ast
import re
import runpy
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "dagster_rayslurm"
REMEDIES: dict[str, str] = runpy.run_path(str(Path(__file__).with_name("remedies.py")))["REMEDIES"]

INTRODUCTION = """\
# Messages

Every error that this package raises, in alphabetical order. `…` stands for names and numbers.
[Troubleshooting](../troubleshooting.md) explains messages of Slurm, SSH and Ray, with cause and remedy.
"""
# What each room of the package is about; a message of any other place is about configuration.
AREAS = {
    **dict.fromkeys(("access", "cli", "doctor"), "Commands"),
    **dict.fromkeys(("edge", "ssh"), "Connection"),
    "environments": "Environments",
    "runtime": "On the nodes",
    **dict.fromkeys(("backends", "execution", "follow", "outcome", "separate", "slurm", "upload"), "Runs"),
}
CONFIGURATION = "Configuration"


def template(node: ast.expr) -> str:
    """The text of an expression, with `…` for what is known only when it is raised; "" if nothing of it is."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(template(each) or "…" for each in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
        return re.sub(r"%[-+ #0]*[\d.]*[a-z]", "…", template(node.left)).replace("%%", "%")
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return (template(node.left) or "…") + (template(node.right) or "…")
    return ""


def raised(tree: ast.AST) -> Iterator[str]:
    """The messages that a module raises, each once for every place."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            for argument in (*node.exc.args, *(each.value for each in node.exc.keywords)):
                text = " ".join(template(argument).split())
                if len(re.sub(r"\W", "", text)) > 8 and " " in text:
                    yield re.sub("…+", "…", text)


def messages(package: Path = PACKAGE) -> dict[str, list[str]]:
    """All messages by area, in alphabetical order whatever their placeholders stand for."""
    found = defaultdict(set)
    for path in package.rglob("*.py"):
        room = path.relative_to(package).parts[0]
        found[AREAS.get(room, CONFIGURATION)].update(raised(ast.parse(path.read_text())))
    key = lambda text: (re.sub(r"^\W+", "", text).lower(), text)  # noqa: E731
    return {area: sorted(found[area], key=key) for area in sorted(found) if found[area]}


def row(message: str) -> str:
    """A line of the table: what is wrong, and what to do, by `REMEDIES` or after the first semicolon of the message."""
    wrong, _, remedy = message.replace("|", r"\|").replace("<", "&lt;").replace("*", r"\*").partition("; ")
    return f"| {wrong} | {REMEDIES.get(message, remedy)} |"


def page() -> str:
    """The page."""
    parts = [INTRODUCTION]
    for area, texts in messages().items():
        parts.append("\n".join([f"## {area}\n", "| message | what to do |", "|---|---|", *map(row, texts), ""]))
    return "\n".join(parts)


if __name__ == "__main__":
    print(page(), end="")
