"""Render the page of all messages from the code: `python scripts/messages.py > docs/reference/messages.md`."""

import ast
import re
import runpy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "dagster_rayslurm"
REMEDIES: dict[str, str] = runpy.run_path(str(Path(__file__).with_name("remedies.py")))["REMEDIES"]

INTRODUCTION = """\
# Messages

Every error of this package, in alphabetical order, and at the end every warning in its log. `…` stands for names and numbers.
[Troubleshooting](../troubleshooting.md) explains messages of Slurm, SSH and Ray, with cause and remedy. The lines of `rayslurm
doctor` are not listed here, because each has its remedy.
"""
# What each room of the package is about; a message of any other place is about configuration.
AREAS = {
    **dict.fromkeys(("access", "cli"), "Commands"),
    **dict.fromkeys(("edge", "ssh"), "Connection"),
    "environments": "Environments",
    "runtime": "On the nodes",
    **dict.fromkeys(("backends", "execution", "follow", "outcome", "separate", "slurm", "upload"), "Runs"),
}
CONFIGURATION, WARNINGS = "Configuration", "Warnings"
# What makes a message without `raise`, and what logs a warning, by the name that is called.
WARNERS = re.compile(r"log\.(warning|error)$|messages\.log$|\b_?warn$")
MAKERS = re.compile(
    rf"(Error|Failure|Exception|Failed|Refused|Unanswered|Connected|Verdict|\bEnd|\b_?fail(ed)?|\b_failure)$|{WARNERS.pattern}"
)
# Texts that are no messages of their own.
LEFT_OUT = {
    "login shell",  # The name of a part of the login.
    "the payload succeeded",  # The verdict on a success.
    "remote_base: …",  # The beginning of other warnings.
}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def templates(node: ast.expr, known: Mapping[str, list[str]]) -> list[str]:
    """The texts that an expression may have, with `…` for what is known only when it is made; `known` has those of variables."""
    match node:
        case ast.Constant(value=str(text)):
            return [re.sub(r"\{[a-z_.]+(![rs])?\}", "…", text)]  # A text for `str.format`.
        case ast.Name(id=name):
            return known.get(name, ["…"])
        case ast.FormattedValue(value=ast.Name() as variable):
            texts = templates(variable, known)
            return texts if all(map(is_sentence, texts)) else ["…"]
        case ast.FormattedValue(value=ast.Constant() | ast.JoinedStr() | ast.BinOp() as part):
            return templates(part, known)
        case ast.JoinedStr(values=parts):
            return ["".join(each) for each in product(*(templates(part, known) for part in parts))]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return templates(ast.JoinedStr([ast.FormattedValue(each, -1) for each in (left, right)]), known)
        case ast.BinOp(left=left, op=ast.Mod()):
            return [re.sub(r"%[-+ #0]*[\d.]*[a-z]", "…", each).replace("%%", "%") for each in templates(left, known)]
        case ast.IfExp(body=body, orelse=otherwise):
            return templates(body, known) + templates(otherwise, known)
    return ["…"]


def is_sentence(text: str) -> bool:
    """Whether a text is more than names and placeholders."""
    return len(re.sub(r"\W", "", text)) > 8 and " " in text


def said(body: Sequence[ast.stmt], known: dict[str, list[str]]) -> Iterator[tuple[str, str]]:
    """The messages that statements make, each with the call that makes it; `known` gets the texts of variables."""
    for node in body:
        own = [each for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr) for each in ast.walk(child)]
        for call in (each for each in own if isinstance(each, ast.Call)):
            name = ast.unparse(call.func)
            if call is getattr(node, "exc", None) or MAKERS.search(name):
                for argument in (*call.args, *(each.value for each in call.keywords)):
                    for text in filter(is_sentence, templates(argument, known)):
                        yield name, re.sub("…+", "…", " ".join(text.split()))
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.Assign(targets=[ast.Tuple(elts=[ast.Name(id=name), *_])], value=ast.Tuple(elts=[value, *_]))
            ):
                known[name] = [text if is_sentence(text) else "…" for text in templates(value, known)]
            case ast.AugAssign(target=ast.Name(id=name)):
                known[name] = [f"{text}…" for text in known.get(name, ["…"])]
        # A block begins with what is known here. After it, each variable may also have its texts at the end of the block.
        parts = (node, *getattr(node, "handlers", ()), *getattr(node, "cases", ()))
        for block in (getattr(part, name, ()) for part in parts for name in ("body", "orelse", "finalbody")):
            branch = dict(known)
            yield from said(block, branch)
            if not isinstance(node, FUNCTIONS) and block and not isinstance(block[-1], (ast.Return, ast.Raise, ast.Continue)):
                for name, texts in branch.items():
                    known[name] = [*dict.fromkeys((*known.get(name, ()), *texts))]


def messages(package: Path = PACKAGE) -> dict[str, list[str]]:
    """All messages by area, in alphabetical order whatever their placeholders stand for."""
    found = defaultdict[str, set[str]](set)
    for path in package.rglob("*.py"):
        room = path.relative_to(package).parts[0]
        if room == "doctor":  # The lines of `rayslurm doctor` end with their remedies.
            continue
        for name, text in said(ast.parse(path.read_text()).body, {}):
            area = WARNINGS if WARNERS.search(name) else AREAS.get(room, CONFIGURATION)
            found[area] |= {text.removeprefix("[rayslurm] ")} - LEFT_OUT
    key = lambda text: (re.sub(r"^\W+", "", text).lower(), text)  # noqa: E731
    return {area: sorted(found[area], key=key) for area in sorted(found) if found[area]}


def wrong_and_remedy(message: str) -> tuple[str, str]:
    """What is wrong, and what to do, by `REMEDIES` or after the first semicolon of the message; "" if neither says it."""
    shown = message.replace("|", r"\|").replace("<", "&lt;").replace("*", r"\*")
    found = re.fullmatch(r"(.*?\w.*?); (.*\w.*)", shown)
    wrong, remedy = found.groups() if found else (shown.removesuffix("; …"), "")
    return wrong, REMEDIES.get(message, remedy)


def row(message: str) -> str:
    """A line of the table."""
    return "| {} | {} |".format(*wrong_and_remedy(message))


def page() -> str:
    """The page."""
    sections = [INTRODUCTION]
    for area, texts in messages().items():
        sections.append("\n".join([f"## {area}\n", "| message | what to do |", "|---|---|", *dict.fromkeys(map(row, texts)), ""]))
    return "\n".join(sections)


if __name__ == "__main__":
    print(page(), end="")
