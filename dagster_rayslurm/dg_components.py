"""Component classes for Dagster's command `dg`, which make assets, asset checks and a `ComputeResource` from a YAML file.

Only `dg` and projects that use these components import this module.
"""

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, get_args

import dagster as dg
from pydantic import BaseModel

from .compute import ComputeResource
from .compute_fields import ComputeFields
from .config import check_list
from .dg_scaffold import ResourceScaffolder, ScriptScaffolder
from .environments import Environment
from .errors import one_sentence
from .failures import retry_policy_for
from .launchers import BashLauncher, RayLauncher
from .resource_table import resource_from, with_kinds, with_variables
from .settings import KEY, parse
from .slurm.config import SlurmQueueConfig

# ---- From YAML to values


def _rendered(context: dg.ResolutionContext, value: Any) -> Any:
    """Returns `value`, a value of a YAML file, with Dagster's templates ("{{ … }}") rendered at any depth.

    Text without a template stays unchanged. Dagster's own resolver would turn text such as "1.10" and "{}" into numbers and
    tables.
    """
    if isinstance(value, Mapping):
        return {name: _rendered(context.at_path(name), each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rendered(context.at_path(index), each) for index, each in enumerate(value)]
    return context.resolve_value(value) if isinstance(value, str) and ("{{" in value or "{%" in value) else value


def _resolver(
    description: str,
    make: Callable[[Any], Any] = lambda value: value,
    *,
    check: Callable[[Any], None] | None = None,
    of: Any = dict[str, Any],
    fields_of: Iterable[type[BaseModel]] = (),
) -> dg.Resolver:
    """Returns the resolver of a component's attribute: the object that makes the attribute's value from the text in YAML.

    Args:
        description: the description of the attribute.
        make: a function that gets the value in the file, with rendered templates, and returns the value of the attribute.
        check: a function that gets the value in the file before templates are rendered, and raises `ValueError` if it is wrong.
        of: the type of the value in the file.
        fields_of: classes whose fields the table in the file may have. The attribute's schema lists these fields for
            `dg check yaml` and editors. If `fields_of` is empty, the schema allows any field.
    """
    fields = {name: field.description for cls in fields_of for name, field in cls.model_fields.items()}
    schema = {name: {"description": text} for name, text in fields.items()}

    def resolve(context: dg.ResolutionContext, value: Any) -> Any:
        try:
            if check is not None:
                check(value)
            return make(_rendered(context, value))
        except (TypeError, ValueError) as error:
            raise ValueError(one_sentence(error)) from None

    more = {"properties": schema, "additionalProperties": False} if schema else None
    return dg.Resolver(resolve, model_field_type=of, description=description, json_schema_extra=more)


def _check_times(value: Any) -> None:
    """Raise `ValueError` if a field `time_limit` in `value`, at any depth, is a number of at least 60.

    Without quotes, YAML reads the text 12:30:00 as the number 45000, which would then count as minutes.
    """
    if isinstance(value, list):
        for each in value:
            _check_times(each)
    for name, each in value.items() if isinstance(value, Mapping) else ():
        if name == "time_limit" and isinstance(each, int) and each >= 60:
            raise ValueError(
                f"time_limit: {each} may be minutes, or what YAML makes of a text such as 12:30:00; write it in quotes, such as "
                '"90" or "12:30:00"'
            )
        _check_times(each)


def _check_texts(values: Any) -> None:
    """Raise `ValueError` if a value in the list or table `values` is a boolean or missing.

    The text of such a value is unknown: YAML reads yes, on and true alike.
    """
    for name, each in values.items() if isinstance(values, Mapping) else enumerate(values):
        if each is None or isinstance(each, bool):
            raise ValueError(f'[{name}]: {each} is no text; write the text in quotes, such as "true"')


def _texts(values: Any) -> list[str]:
    return [str(each) for each in check_list(values, "arguments, such as [--epochs, 3]")]


def _variables(table: Mapping[str, Any]) -> dict[str, Any]:
    return {name: each if isinstance(each, dg.EnvVar) else str(each) for name, each in with_variables(dict(table)).items()}


def _queue(table: dict[str, Any]) -> dict[str, Any]:
    SlurmQueueConfig(**table)
    return table


def _launcher(table: dict[str, Any]) -> dict[str, Any]:
    if "kind" in table:  # Otherwise the resource's launcher says the class, and the table is checked when definitions load.
        parse({"launcher": table}, "attribute launcher").launcher_after(RayLauncher)
    return table


def _environment(table: dict[str, Any]) -> Any:
    return with_kinds(ComputeFields, {"environment": with_variables(table)})["environment"]


def _retry_policy(table: dict[str, Any]) -> dg.RetryPolicy:
    return retry_policy_for(*table.pop("kinds", ()), **table)


def _described(description: str) -> dg.Resolver:
    resolver: dg.Resolver = dg.Resolver.default(description=description)
    return resolver


# ---- The components


@dg.scaffold_with(ScriptScaffolder)
class RaySlurmScriptComponent(dg.Component, dg.Resolvable, dg.Model):
    """Assets and asset checks that a Python script or module makes; a `ComputeResource` runs the script or module."""

    model_config = {"arbitrary_types_allowed": True}

    script: Annotated[str | None, _described("Python script; its path is relative to the component's directory.")] = None
    module: Annotated[str | None, _described("Module to run in place of a script; the environment must have it.")] = None
    args: Annotated[
        list[str], _resolver("Arguments of the script or module.", _texts, check=_check_texts, of=list[str | bool | int | float])
    ] = []
    assets: Annotated[list[dg.ResolvedAssetSpec], _described("Assets that it makes; partitions are those of the assets.")] = []
    checks: Annotated[list[dg.ResolvedAssetCheckSpec], _described("Asset checks that it evaluates.")] = []
    name: Annotated[str | None, _described("Name of the step; by default that of the first asset or check.")] = None
    resource_key: Annotated[str, _described("Key of the ComputeResource that runs it.")] = "compute"
    launcher: Annotated[
        dict[str, Any],
        _resolver("Fields of the launcher, over the resource's.", _launcher, fields_of=(RayLauncher, BashLauncher)),
    ] = {}
    queue: Annotated[
        dict[str, Any],
        _resolver("Fields of SlurmQueueConfig, over the resource's.", _queue, check=_check_times, fields_of=(SlurmQueueConfig,)),
    ] = {}
    environment: Annotated[
        Any, _resolver("Environment in place of the resource's, by its kind.", _environment, fields_of=get_args(Environment))
    ] = None
    extra_env: Annotated[
        dict[str, Any], _resolver("Variables of the script and its Ray workers.", _variables, check=_check_texts)
    ] = {}
    secret_env: Annotated[
        dict[str, Any], _resolver("Variables of the script alone, as {env: NAME}.", _variables, check=_check_texts)
    ] = {}
    extra_files: Annotated[list[str], _described("Files for its working directory, relative to the component's.")] = []
    outputs: Annotated[list[str], _described("Patterns of files to bring back from its working directory.")] = []
    uses_pipes: Annotated[bool, _described("Whether it opens Dagster Pipes; otherwise its exit code alone decides.")] = True
    retry_policy: Annotated[
        Any, _resolver("Arguments of retry_policy_for: kinds, max_retries, delay.", _retry_policy, of=dict[str, Any])
    ] = None
    pool: Annotated[str | None, _described("Pool of Dagster that limits how many such steps run at once.")] = None

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """Returns definitions with the assets and asset checks; raises `ValueError` if attributes contradict each other."""
        directory = context.path.parent if context.path.is_file() else context.path
        payload = self._payload(directory)
        if not self.assets and not self.checks:
            raise ValueError("RaySlurmScriptComponent: assets and checks are empty; list at least one")
        first = self.assets[0].key.to_python_identifier() if self.assets else self.checks[0].get_python_identifier()
        sections = {name: table for name, table in (("queue", self.queue), ("launcher", self.launcher)) if table}
        options: dict[str, Any] = {
            "name": self.name or first,
            "required_resource_keys": {self.resource_key},
            "op_tags": {KEY: sections} if sections else {},
            "retry_policy": self.retry_policy,
            "pool": self.pool,
        }

        def run(context: Any) -> Any:
            compute: ComputeResource = getattr(context.resources, self.resource_key)
            return compute.run(
                context=context,
                payload_path=payload,
                environment=self.environment,
                extra_env=self.extra_env,
                secret_env=self.secret_env,
                extra_files=[directory / each for each in self.extra_files],
                outputs=self.outputs,
                uses_pipes=self.uses_pipes,
            ).get_results()

        if not self.assets:

            @dg.multi_asset_check(specs=self.checks, **options)
            def script_checks(context: dg.AssetCheckExecutionContext) -> Iterator[Any]:
                yield from run(context)

            return dg.Definitions(asset_checks=[script_checks])

        @dg.multi_asset(specs=self.assets, check_specs=self.checks, **options)
        def script_assets(context: dg.AssetExecutionContext) -> Iterator[Any]:
            yield from run(context)

        return dg.Definitions(assets=[script_assets])

    def _payload(self, directory: Path) -> str | list[str]:
        if (self.script is None) == (self.module is None):
            raise ValueError("RaySlurmScriptComponent: give either script or module")
        if self.module is not None:
            return ["python", "-m", self.module, *self.args]
        script = (directory / str(self.script)).absolute()
        if script.suffix != ".py" or not script.is_file():
            raise ValueError(f"RaySlurmScriptComponent: script: there is no Python script {str(script)!r}")
        return shlex.join([str(script), *self.args])


@dg.scaffold_with(ResourceScaffolder)
class ComputeResourceComponent(dg.Component, dg.Resolvable, dg.Model):
    """A `ComputeResource` under the key `resource_key`. Assets that require this key run their payloads with the resource."""

    resource_key: Annotated[str, _described("Key of the resource.")] = "compute"
    resource: Annotated[
        dict[str, Any],
        _resolver("Fields of ComputeResource; {env: NAME} is a variable.", check=_check_times, fields_of=(ComputeResource,)),
    ] = {}

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:  # noqa: ARG002
        """Returns definitions with the resource under the key `resource_key`; raises `ValueError` if a field is invalid."""
        return dg.Definitions(resources={self.resource_key: resource_from(self.resource, "ComputeResourceComponent")})
