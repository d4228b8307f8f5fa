"""The manifest of a pixi project: the packages for an environment, and the variables and scripts of the activation.

https://pixi.sh/latest/reference/pixi_manifest/ describes the tables.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tomli
from packaging.requirements import Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name


@dataclass(frozen=True)
class Wanted:
    """The packages that a manifest wants in an environment on a platform, and the variables and scripts that activation adds."""

    conda: list[tuple[str, str]]  # Name of each package, and version and build as in a MatchSpec; "" for any.
    pypi: list[tuple[str, str]]  # Name of each package, and version specifier; "" for any.
    variables: dict[str, str]  # Variables that the activation sets after the scripts of the packages.
    scripts: list[str]  # Paths of scripts that the activation sources last.


def read_manifest(path: str) -> Mapping[str, Any]:
    """Return the tables of a pixi.toml, or the tables below tool.pixi in a pyproject.toml.

    For a pyproject.toml, the result also has all tables of the file as "pyproject". Raises `ValueError` if the file cannot be
    read, or if a pyproject.toml has no table tool.pixi.
    """
    try:
        with open(path, "rb") as file:
            tables = tomli.load(file)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; name the pixi.toml or pyproject.toml of a project") from None
    except ValueError as error:
        raise ValueError(f"{path} is not TOML: {error}") from None
    if os.path.basename(path) != "pyproject.toml":
        return tables
    if "pixi" not in tables.get("tool", {}):
        raise ValueError(f"{path} has no table tool.pixi; name the manifest of a pixi project")
    return {**tables["tool"]["pixi"], "pyproject": tables}


def features_of(tables: Mapping[str, Any], environment: str) -> list[str]:
    """Return the names of the features that make up an environment, the feature with the highest priority first.

    `tables` are the result of `read_manifest`, and `environment` is the name of the environment. Raises `ValueError` if the
    manifest lacks the environment.
    """
    environments = {"default": [], **tables.get("environments", {})}
    if environment not in environments:
        raise ValueError(f"the manifest has no environment {environment!r}; it has {', '.join(environments)}")
    chosen = environments[environment]
    chosen = chosen if isinstance(chosen, Mapping) else {"features": chosen}
    return [*chosen.get("features", []), *([] if chosen.get("no-default-feature") else ["default"])]


def wanted(tables: Mapping[str, Any], features: Iterable[str], selectors: Sequence[str]) -> Wanted:
    """Return the packages, activation variables and activation scripts of the features `features` of a manifest.

    `tables` are the result of `read_manifest`. If several features set a variable, the first feature counts. `selectors` name the
    `[target.NAME]` tables that apply to the platform, such as "unix" and "linux-64"; later selectors win.
    """
    found = Wanted([], [], {}, [])
    for name in features:
        feature = tables if name == "default" else tables.get("feature", {}).get(name, {})
        parts = [feature, *(feature.get("target", {}).get(selector, {}) for selector in selectors)]
        for key in ("dependencies", "host-dependencies", "build-dependencies"):
            found.conda.extend((package.lower(), _conda_version(spec)) for package, spec in _certain(_merged(parts, key)))
        found.pypi.extend((package, _pypi_version(spec)) for package, spec in _certain(_merged(parts, "pypi-dependencies")))
        found.pypi.extend(_pyproject(tables.get("pyproject", {}), name))
        activations = [part.get("activation", {}) for part in parts]
        found.scripts.extend(_merged(parts, "activation").get("scripts", []))
        for variable, value in _merged(activations, "env").items():
            found.variables.setdefault(variable, str(value))
    return found


def _merged(parts: Iterable[Mapping[str, Any]], key: str) -> dict[str, Any]:
    """Return one table that merges the table `key` of each part; for a name in several parts, the last part's value counts."""
    return {name: value for part in parts for name, value in part.get(key, {}).items()}


def misfit(package: str, spec: str, versions: Mapping[str, str]) -> str:
    """Return a phrase such as "lacks numpy" if a lock lacks a PyPI package or has an unwanted version of it; "" if the lock fits.

    `package` is the name of the package, and `spec` the wanted version specifier; "" for any version. `versions` are the versions
    in the lock by canonical package name. A text that begins with "<", such as "<conda>", stands for an unknown version, which
    always fits.
    """
    version = versions.get(canonicalize_name(package))
    if version is None:
        return f"lacks {package}"
    try:
        fits = not spec or version.startswith("<") or SpecifierSet(spec).contains(version, prereleases=True)
    except InvalidSpecifier:
        fits = True  # pixi understood it, as it wrote the lock.
    return "" if fits else f"has {package} {version} where the manifest wants {spec}"


def _certain(dependencies: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    """Return the name and the specifier of each dependency that has no condition. An environment marker is such a condition."""
    conditions = {"when", "markers", "env-markers"}
    return [(name, spec) for name, spec in dependencies.items() if not isinstance(spec, Mapping) or not conditions & spec.keys()]


def _conda_version(spec: object) -> str:
    if isinstance(spec, Mapping):
        return f"{spec.get('version', '*')} {spec.get('build', '')}".strip()
    return str(spec)


def _pypi_version(spec: object) -> str:
    version = str(spec.get("version", "")) if isinstance(spec, Mapping) else str(spec)
    return "" if version == "*" else version


def _pyproject(tables: Mapping[str, Any], feature: str) -> Iterable[tuple[str, str]]:
    """Yield the name and the version specifier of each requirement that standard tables of a pyproject.toml list for a feature.

    For the feature "default", the requirements are the dependencies of the project. For another feature, the requirements are the
    content of the extra and of the dependency group with the feature's name. Requirements with an environment marker are left
    out.
    """
    project = tables.get("project", {})
    if feature == "default":
        requirements = project.get("dependencies", [])
    else:
        requirements = [
            *project.get("optional-dependencies", {}).get(feature, []),
            *tables.get("dependency-groups", {}).get(feature, []),
        ]
    for each in map(Requirement, filter(lambda text: isinstance(text, str), requirements)):
        if each.marker is None:
            yield each.name, str(each.specifier)
