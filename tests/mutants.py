"""Seeded mutants: shows whether the tests notice small changes of the code. `python -m tests.mutants --help`.

Run it before and after tests are merged or deleted: the share of mutants that the tests kill must not fall. Each mutant is one
change of one module (a comparison, a Boolean operator, a condition, a number, or a deleted `raise` or `return`), drawn by a seed,
so that two runs on the same code test the same mutants.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "dagster_rayslurm"
TIMEOUT = 300
"""Seconds for the tests of one mutant; a mutant that makes them hang counts as killed."""


_SWAPS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}


def mutants_of(source: str) -> Iterator[tuple[int, str, str]]:
    """All mutants of a module: line, what changed, and the changed source."""
    tree = ast.parse(source)
    for index, node in enumerate(ast.walk(tree)):
        for change in _changes(node):
            mutated = copy.deepcopy(tree)
            target = next(each for at, each in enumerate(ast.walk(mutated)) if at == index)
            _apply(target, change)
            yield (
                getattr(node, "lineno", 0),
                f"{change} in `{ast.unparse(node)[:60]}`",
                ast.unparse(ast.fix_missing_locations(mutated)),
            )


def _changes(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return ["swap comparison"]
    if isinstance(node, ast.BoolOp):
        return ["swap and/or"]
    if isinstance(node, (ast.If, ast.IfExp)) and not (isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
        return ["negate condition"]
    if isinstance(node, ast.Raise):
        return ["drop raise"]
    if isinstance(node, ast.Return) and node.value is not None:
        return ["return None"]
    if isinstance(node, ast.Constant) and type(node.value) is int and node.value in (0, 1, 2):
        return ["add one"]
    return []


def _apply(node: ast.AST, change: str) -> None:
    if isinstance(node, ast.Compare):
        node.ops = [_SWAPS[type(node.ops[0])]()]
    elif isinstance(node, ast.BoolOp):
        node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    elif isinstance(node, (ast.If, ast.IfExp)):
        node.test = ast.UnaryOp(ast.Not(), node.test)
    elif isinstance(node, ast.Raise):
        node.exc = ast.Call(ast.Name("AssertionError", ast.Load()), [ast.Constant("mutant")], [])
        node.cause = None
    elif isinstance(node, ast.Return):
        node.value = ast.Constant(None)
    elif isinstance(node, ast.Constant):
        node.value += 1  # type: ignore[operator]


def draw(targets: dict[str, tuple[str, ...]], count: int, seed: int) -> list[tuple[str, int, str, str]]:
    """`count` mutants, spread evenly over the modules: module, line, change, source."""
    chance = random.Random(seed)
    pools = {}
    for module in targets:
        pools[module] = list(mutants_of((ROOT / PACKAGE / module).read_text()))
        chance.shuffle(pools[module])
    drawn = []
    while len(drawn) < count and any(pools.values()):
        for module, pool in pools.items():
            if pool and len(drawn) < count:
                drawn.append((module, *pool.pop()))
    return drawn


def is_killed(checkout: Path, module: str, source: str, tests: tuple[str, ...]) -> bool:
    """Whether the tests fail on a mutant."""
    path = checkout / PACKAGE / module
    original = path.read_text()
    path.write_text(source)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-m",
        "not stack and not ray",
    ]
    try:
        return subprocess.run([*command, *tests], cwd=checkout, capture_output=True, timeout=TIMEOUT).returncode != 0
    except subprocess.TimeoutExpired:
        return True
    finally:
        path.write_text(original)


def main() -> int:
    """Draw mutants, run the tests on each, and print those that survive."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--targets", type=Path, default=ROOT / "tests" / "mutants.json", help="JSON: module → tests")
    parser.add_argument("--only", help="modules whose path contains this")
    options = parser.parse_args()
    targets = {module: tuple(tests) for module, tests in json.loads(options.targets.read_text()).items()}
    targets = {module: tests for module, tests in targets.items() if not options.only or options.only in module}
    survivors = killed = 0
    with tempfile.TemporaryDirectory() as directory:
        checkout = Path(directory, "checkout")
        shutil.copytree(ROOT, checkout, ignore=shutil.ignore_patterns(".*", "__pycache__"))
        for module, line, change, source in draw(targets, options.count, options.seed):
            began = time.monotonic()
            dead = is_killed(checkout, module, source, targets[module])
            killed, survivors = killed + dead, survivors + (not dead)
            print(f"{'killed  ' if dead else 'SURVIVED'} {module}:{line} {change} ({time.monotonic() - began:.1f} s)", flush=True)
    print(f"{killed} of {killed + survivors} mutants killed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
