"""Configuration classes, and the problems of Dagster 1.13 that they avoid."""

import subprocess
import sys
from typing import Any

import dagster as dg
import pytest
from pydantic import ValidationError

import dagster_rayslurm
from dagster_rayslurm import (
    BashLauncher,
    CommandEnvironment,
    ComputeResource,
    ExecutionMode,
    HetComponent,
    InheritedEnvironment,
    Launcher,
    PackedEnvironment,
    PreDeployedEnvironment,
    RayLauncher,
    RunFailure,
    SessionConfig,
    SlurmQueueConfig,
    SlurmResource,
    SSHConnectionResource,
    UvEnvironment,
)
from dagster_rayslurm.config import check_environment, resolve_variables, time_limit_seconds
from dagster_rayslurm.slurm.config import split_signal

PUBLIC = [
    BashLauncher,
    CommandEnvironment,
    ComputeResource,
    HetComponent,
    InheritedEnvironment,
    PackedEnvironment,
    PreDeployedEnvironment,
    RayLauncher,
    SSHConnectionResource,
    SessionConfig,
    SlurmQueueConfig,
    SlurmResource,
    UvEnvironment,
]

DEFAULTS: dict[type, dict[str, Any]] = {
    ComputeResource: {
        "mode": "local",
        "slurm": None,
        "components": [],
        "topology": "spanning",
        "enable_cluster_reuse": False,
        "pre_deployed_env_path": None,
        "auto_detect_platform": True,
        "data_dir": None,
        "require_messages": True,
        "keep_run_dirs": "failed",
        "retention_days": 14,
        "connection_loss_timeout": 86400,
        "queue_timeout": None,
        "on_unhealthy": "fail",
    },
    SlurmResource: {"ssh": None, "remote_base": "~/.dagster_rayslurm", "poll_interval": 30},
    SlurmQueueConfig: {
        **dict.fromkeys(
            [
                "partition",
                "account",
                "qos",
                "reservation",
                "constraint",
                "cpus_per_node",
                "gpus_per_node",
                "gpu_type",
                "mem",
                "mem_per_cpu",
                "nodelist",
                "exclude",
                "switches",
                "signal_before_timeout",
            ]
        ),
        "num_nodes": 1,
        "time_limit": "01:00:00",
        "exclusive": False,
        "requeue": False,
        "extra_sbatch": [],
    },
    SSHConnectionResource: {
        **dict.fromkeys(["user", "key_path", "key_passphrase", "password", "certificate_path", "jump_host", "known_hosts_file"]),
        "port": 22,
        "host_key_checking": "accept-new",
        "client": "paramiko",
        "require_existing_master": False,
        "connect_timeout": 30,
        "keepalive": 15,
    },
    RayLauncher: {
        **dict.fromkeys(
            [
                "num_cpus_per_node",
                "num_gpus_per_node",
                "max_workers",
                "min_nodes",
                "ray_version",
                "head_node_address",
                "network_interface",
                "component_id",
                "working_dir",
                "object_store_memory_gb",
                "port_range",
                "health_check",
            ]
        ),
        "fabric": "none",
        "ray_args": [],
        "resources": {},
        "labels": {},
        "dashboard": True,
        "auth": "token",
        "launch_style": "builtin",
        "memory_guard": True,
        "startup_timeout": 300,
        "grace_period": 10,
        "preload": [],
    },
    BashLauncher: {"working_dir": None, "num_cpus": None, "num_gpus": None, "grace_period": 10},
    SessionConfig: {
        "name": None,
        "num_nodes": None,
        "time_limit": None,
        "idle_timeout": 600,
        "max_concurrent_payloads": 1,
        "scope": "shared",
        "on_misfit": "new-session",
    },
    HetComponent: {"head": False},
}


@pytest.mark.parametrize("cls", DEFAULTS, ids=lambda cls: cls.__name__)
def test_fields_and_defaults_are_the_published_ones(cls: Any) -> None:
    required: dict[type, dict[str, Any]] = {
        SSHConnectionResource: {"host": "h"},
        HetComponent: {"component_id": "c", "queue": SlurmQueueConfig()},
    }
    instance = cls(**required.get(cls, {}))
    assert {name: getattr(instance, name) for name in DEFAULTS[cls]} == DEFAULTS[cls]


@pytest.mark.parametrize("cls", PUBLIC, ids=lambda cls: cls.__name__)
def test_every_field_has_a_description(cls: Any) -> None:
    missing = [name for name, field in cls.model_fields.items() if not field.description]
    assert missing == [] and cls.__doc__


@pytest.mark.parametrize("cls", PUBLIC, ids=lambda cls: cls.__name__)
def test_unknown_keys_are_refused(cls: Any) -> None:
    with pytest.raises(ValidationError, match="num_gpu_per_nodes"):
        cls(num_gpu_per_nodes=1, host="h", path="p", component_id="c", queue=SlurmQueueConfig())


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: ComputeResource(mode="slrum"), "'slrum' is not one of 'local', 'slurm', 'slurm-session', 'slurm-hetjob'"),
        (lambda: ComputeResource(keep_run_dirs="some"), "'some' is not one of 'all', 'failed', 'none'"),
        (lambda: ComputeResource(retention_days=-1), "at least 1 days"),
        (lambda: SlurmQueueConfig(time_limit="1h"), "'1h' is not a Slurm time limit; write minutes"),
        (lambda: SlurmQueueConfig(time_limit="01:00:00\n#SBATCH --uid=0"), "control character"),
        (lambda: SlurmQueueConfig(partition="gpu\n"), "control character"),
        (lambda: SlurmQueueConfig(mem="lots"), "'lots' is not a Slurm memory size"),
        (lambda: SlurmQueueConfig(mem=64), '64 has no unit; write "64G" for GiB'),
        (lambda: SlurmQueueConfig(time_limit="0"), "'0' means no time limit to Slurm; write a limit, such as \"01:00:00\""),
        (lambda: SlurmQueueConfig(time_limit=0), "'0' means no time limit"),
        (lambda: SessionConfig(time_limit="00:00:00"), "'00:00:00' means no time limit"),
        (lambda: SlurmQueueConfig(gpus_per_node="a100:2"), "write gpus_per_node=2 and gpu_type='a100'"),
        (lambda: SlurmQueueConfig(gpus_per_node="gpu:1g.5gb:2"), "write gpus_per_node=2 and gpu_type='1g.5gb'"),
        (lambda: SlurmQueueConfig(gpus_per_node="two"), "'two' is not a number of at least 0"),
        (lambda: SlurmQueueConfig(num_nodes=0), "at least 1"),
        (lambda: SlurmQueueConfig(extra_sbatch=["-p gpu"]), "'-p gpu' is not a long option"),
        (lambda: SlurmQueueConfig(extra_sbatch="--x"), "write a list"),
        (lambda: SlurmQueueConfig(signal_before_timeout="soon"), "SIGNAL@SECONDS"),
        (lambda: SlurmQueueConfig(signal_before_timeout="USR3@300"), "there is no signal USR3"),
        (lambda: SlurmQueueConfig(signal_before_timeout="SIGSIGUSR1@300"), "there is no signal SIGSIGUSR1"),
        (lambda: SlurmQueueConfig(signal_before_timeout="99@300"), "there is no signal 99"),
        (lambda: SlurmQueueConfig(signal_before_timeout="0@300"), "there is no signal 0"),
        (lambda: SlurmQueueConfig(signal_before_timeout="USR1@0"), "at least 1 second"),
        (lambda: SlurmQueueConfig(signal_before_timeout="0"), "at least 1 second"),
        (lambda: SSHConnectionResource(host="h", host_key_checking="no"), "'no' is not one of"),
        (lambda: SSHConnectionResource(host="h\0"), "control character"),
        (lambda: SSHConnectionResource(host="me@login"), "'me@login' is more than a host; write the host alone, and `user`"),
        (lambda: SSHConnectionResource(host="login:2222"), "is more than a host; write the host alone"),
        (lambda: SSHConnectionResource(host="ssh://me@login:22"), "is more than a host; write the host alone"),
        (lambda: SSHConnectionResource(host="[fe80::1]:22"), "is more than a host; write the host alone"),
        (lambda: RayLauncher(num_cpus_per_node=-1), "at least 0"),
        (lambda: RayLauncher(auth="none"), "'none' is not one of 'token', 'disabled'"),
        (lambda: RayLauncher(port_range="1-2"), "LOW-HIGH"),
        (lambda: RayLauncher(ray_args=["--head"]), "--head is set by the launcher itself"),
        (lambda: RayLauncher(ray_args="--x"), "write a list"),
        (lambda: RayLauncher(component_id="a b"), "is not a name"),
        (lambda: SessionConfig(scope="global"), "'global' is not one of"),
        (lambda: HetComponent(component_id="../x", queue=SlurmQueueConfig()), "is not a name"),
    ],
)
def test_a_bad_value_gets_one_clear_sentence(make: Any, says: str) -> None:
    with pytest.raises(ValidationError) as caught:
        make()
    assert len(caught.value.errors()) == 1 and says in str(caught.value)


@pytest.mark.parametrize("host", ["login", "login.example.org", "10.0.0.1", "::1", "fe80::1%eth0", "fe80::1"])
def test_names_and_addresses_are_hosts(host: str) -> None:
    assert SSHConnectionResource(host=host).host == host


@pytest.mark.parametrize("limit", ["30", "90:00", "01:00:00", "2-12", "2-12:30", "2-12:30:15", "UNLIMITED"])
def test_time_limits_of_sbatch(limit: str) -> None:
    assert SlurmQueueConfig(time_limit=limit).time_limit == limit


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        ("30", 1800),
        ("90:05", 5405),
        ("01:02:03", 3723),
        ("2-12", 216000),
        ("2-12:30", 217800),
        ("2-12:30:15", 217815),
        ("0", None),
        ("00:00:00", None),
        ("UNLIMITED", None),
        ("infinite", None),
    ],
)
def test_time_limits_in_seconds(limit: str, seconds: float | None) -> None:
    assert time_limit_seconds(limit) == seconds


@pytest.mark.parametrize(
    ("text", "name", "seconds"), [("300", "TERM", 300), ("USR1@60", "USR1", 60), ("SIGUSR1@60", "USR1", 60), ("10@1", "10", 1)]
)
def test_signals_by_name_and_number(text: str, name: str, seconds: float) -> None:
    assert split_signal(SlurmQueueConfig(signal_before_timeout=text).signal_before_timeout) == (name, seconds)


def test_an_enum_member_is_its_value() -> None:
    assert ComputeResource(mode=ExecutionMode.SLURM_SESSION).mode == "slurm-session"  # type: ignore[arg-type]


def materialize(compute: ComputeResource, run_config: Any = None) -> ComputeResource:
    """The resource as an asset sees it."""
    seen = []

    @dg.asset
    def look(compute: ComputeResource) -> None:
        seen.append(compute)

    dg.materialize([look], resources={"compute": compute}, run_config=run_config)
    return seen[0]


def test_env_vars_are_resolved_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"RS_MODE": "slurm", "RS_HOST": "edge", "RS_PORT": "2222", "RS_VERSION": "2.60.0", "RS_LABEL": "blue", "RS_N": "3"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    seen = materialize(
        ComputeResource(
            mode=dg.EnvVar("RS_MODE"),
            slurm=SlurmResource(
                ssh=SSHConnectionResource(
                    host=dg.EnvVar("RS_HOST"),
                    port=dg.EnvVar.int("RS_PORT"),
                    jump_host=SSHConnectionResource(host="j1", jump_host=SSHConnectionResource(host=dg.EnvVar("RS_HOST"))),
                ),
                queue=SlurmQueueConfig(num_nodes=dg.EnvVar.int("RS_N"), extra_sbatch=["--x=1", "--y"]),
            ),
            default_launcher=RayLauncher(ray_version=dg.EnvVar("RS_VERSION"), labels={"colour": dg.EnvVar("RS_LABEL")}),
            components=[HetComponent(component_id="gpu", queue=SlurmQueueConfig(num_nodes=2), launcher=BashLauncher())],
        )
    )
    assert seen.mode == "slurm" and seen.slurm is not None and seen.slurm.ssh is not None
    ssh = seen.slurm.ssh
    assert (ssh.host, ssh.port) == ("edge", 2222)
    assert ssh.jump_host is not None and ssh.jump_host.jump_host is not None and ssh.jump_host.jump_host.host == "edge"
    assert seen.slurm.queue.num_nodes == 3 and seen.slurm.queue.extra_sbatch == ["--x=1", "--y"]
    assert isinstance(seen.default_launcher, RayLauncher)
    assert (seen.default_launcher.ray_version, seen.default_launcher.labels) == ("2.60.0", {"colour": "blue"})
    assert isinstance(seen.components[0].launcher, BashLauncher) and seen.components[0].queue.num_nodes == 2


def test_a_bad_value_of_a_variable_is_found_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RS_MODE", "slrum")
    with pytest.raises(dg.DagsterResourceFunctionError) as caught:
        materialize(ComputeResource(mode=dg.EnvVar("RS_MODE")))
    assert "'slrum' is not one of" in str(caught.value.__cause__)


def test_run_config_chooses_and_refuses() -> None:
    compute = ComputeResource.configure_at_launch()
    config = {"mode": "local", "default_launcher": {"bash": {"grace_period": 3}}, "environment": {"pre-deployed": {"path": "/x"}}}
    seen = materialize(compute, {"resources": {"compute": {"config": config}}})
    assert seen.default_launcher == BashLauncher(grace_period=3) and seen.environment == PreDeployedEnvironment(path="/x")
    with pytest.raises(dg.DagsterInvalidConfigError, match="num_cpu"):
        materialize(compute, {"resources": {"compute": {"config": {"default_launcher": {"bash": {"num_cpu": 3}}}}}})


def test_a_partial_override_resets_the_siblings() -> None:
    """What the documentation warns of: the fields that the run config leaves out get their defaults."""
    compute = ComputeResource(default_launcher=RayLauncher(num_cpus_per_node=2, dashboard=False))
    override = {"resources": {"compute": {"config": {"default_launcher": {"ray": {"num_cpus_per_node": 1}}}}}}
    launcher = materialize(compute, override).default_launcher
    assert isinstance(launcher, RayLauncher) and launcher.num_cpus_per_node == 1 and launcher.dashboard is True


def test_required_resource_keys_work_like_parameters() -> None:
    seen = []

    @dg.op(required_resource_keys={"compute"})
    def look(context: dg.OpExecutionContext) -> None:
        seen.append(context.resources.compute)

    @dg.job(resource_defs={"compute": ComputeResource(mode="local")})
    def look_job() -> None:
        look()

    look_job.execute_in_process()
    assert isinstance(seen[0], ComputeResource)


@pytest.mark.parametrize("base", [RayLauncher, BashLauncher])
def test_a_subclass_that_dagster_would_downcast_is_refused(base: Any) -> None:
    with pytest.raises(TypeError, match=r"derive from Launcher"):
        type("Mine", (base,), {})


def test_a_custom_launcher_derives_from_launcher() -> None:
    class Torchrun(Launcher):
        nproc: int = 2

        def command(self, argv: list[str]) -> list[str]:
            return ["torchrun", f"--nproc={self.nproc}", *argv[1:]]

    assert Torchrun().command(["python", "x.py"]) == ["torchrun", "--nproc=2", "x.py"]


def test_from_env_refers_to_variables_that_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOST", "PORT", "USER", "PASSWORD", "JUMP_HOST", "JUMP_KEY_PATH"):
        monkeypatch.setenv(f"SITE_{name}", {"PORT": "2200"}.get(name, f"the-{name}"))
    for prefix in ("SITE_", "SITE"):
        ssh = SSHConnectionResource.from_env(prefix)
        assert isinstance(ssh.password, dg.EnvVar) and ssh.key_path is None and ssh.client == "paramiko"
        resolved = materialize(ComputeResource(mode="slurm", slurm=SlurmResource(ssh=ssh), pre_deployed_env_path="/env")).slurm
        assert resolved is not None and resolved.ssh is not None and resolved.ssh.jump_host is not None
        assert (resolved.ssh.host, resolved.ssh.port, resolved.ssh.user) == ("the-HOST", 2200, "the-USER")
        assert resolved.ssh.jump_host.key_path == "the-JUMP_KEY_PATH"


def test_from_env_reads_key_as_key_path(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOST", "KEY", "JUMP_HOST", "JUMP_KEY"):
        monkeypatch.setenv(f"OTHER_{name}", f"the-{name}")
    ssh = SSHConnectionResource.from_env("OTHER")
    assert isinstance(ssh.key_path, dg.EnvVar) and ssh.key_path.get_value() == "the-KEY"
    assert ssh.jump_host is not None and isinstance(ssh.jump_host.key_path, dg.EnvVar)
    assert ssh.jump_host.key_path.get_value() == "the-JUMP_KEY"
    monkeypatch.setenv("OTHER_KEY_PATH", "the-KEY_PATH")
    ssh = SSHConnectionResource.from_env("OTHER")
    assert isinstance(ssh.key_path, dg.EnvVar) and ssh.key_path.get_value() == "the-KEY_PATH"


def test_from_env_warns_of_unknown_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOST", "FORCE_TTY", "JUMP_OPTS_EXTRA"):
        monkeypatch.setenv(f"ELSE_{name}", "secret")
    with pytest.warns(UserWarning) as told:
        SSHConnectionResource.from_env("ELSE")
        SSHConnectionResource.from_env("ELSE")
    (said,) = [str(each.message) for each in told]
    assert said.startswith(
        "ELSE_FORCE_TTY, ELSE_JUMP_OPTS_EXTRA: no such variable is read; there are ELSE_HOST, ELSE_PORT, ELSE_"
    )
    assert "secret" not in said


@pytest.mark.parametrize(
    ("ray_args", "rest", "dashboard"),
    [
        (["--include-dashboard=true"], [], True),
        (["--include-dashboard=false"], [], False),
        (["--include-dashboard=false", "--verbose"], ["--verbose"], False),
        (["--dashboard-host=0.0.0.0"], ["--dashboard-host=0.0.0.0"], True),
    ],
)
def test_ray_args_can_say_whether_there_is_a_dashboard(ray_args: list[str], rest: list[str], dashboard: bool) -> None:
    resource = materialize(ComputeResource(default_launcher=RayLauncher(ray_args=ray_args)))
    launcher = resource.default_launcher
    assert isinstance(launcher, RayLauncher) and (launcher.ray_args, launcher.dashboard) == (rest, dashboard)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"ray_args": ["--include-dashboard=true"], "dashboard": False}, "contradicts dashboard=False; remove one of them"),
        ({"ray_args": ["--include-dashboard"]}, 'write "--include-dashboard=true" or "=false"'),
        ({"ray_args": ["--include-dashboard", "true"]}, 'write "--include-dashboard=true" or "=false"'),
    ],
)
def test_ray_args_that_contradict_themselves_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match="include-dashboard") as refused:
        RayLauncher(**fields)
    assert said in str(refused.value)


def test_from_env_complains_at_use_not_at_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOWHERE_HOST", raising=False)
    ssh = SSHConnectionResource.from_env("NOWHERE")
    with pytest.raises(dg.DagsterInvalidConfigError, match="NOWHERE_HOST"):
        materialize(ComputeResource(mode="slurm", slurm=SlurmResource(ssh=ssh), pre_deployed_env_path="/env"))


def test_a_password_never_shows_in_a_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SITE_HOST", "h")
    monkeypatch.setenv("SITE_PASSWORD", "hunter2")
    compute = ComputeResource(slurm=SlurmResource(ssh=SSHConnectionResource.from_env("SITE")))

    @dg.asset
    def uses(compute: ComputeResource) -> None: ...

    job = dg.Definitions(assets=[uses], resources={"compute": compute}).resolve_implicit_global_asset_job_def()
    assert "hunter2" not in str(job.run_config_schema.config_type.__dict__) and "hunter2" not in repr(compute)


def test_variables_in_a_launcher_of_a_call_are_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RS_N", "2")
    launcher = RayLauncher(num_cpus_per_node=dg.EnvVar.int("RS_N"), labels={"a": dg.EnvVar("RS_UNSET")})
    with pytest.raises(ValueError, match=r"launcher\.labels\['a'\]: the environment variable RS_UNSET is not set"):
        resolve_variables(launcher, "launcher")
    monkeypatch.setenv("RS_UNSET", "x")
    resolved = resolve_variables(launcher, "launcher")
    assert resolved.num_cpus_per_node == 2 and resolved.labels == {"a": "x"}


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"RAY_ADDRESS": "x"}, "RAY_ADDRESS is reserved"),
        ({"DAGSTER_PIPES_CONTEXT": "x"}, "DAGSTER_PIPES_CONTEXT is reserved"),
        ({"RAYSLURM_DATA_DIR": "x"}, "RAYSLURM_DATA_DIR is reserved"),
        ({"A B": "x"}, "'A B' is not a name"),
        ({"": "x"}, "'' is not a name"),
        ({"A": "x\0"}, "NUL"),
        ({"A": 3}, "int is not a string"),
    ],
)
def test_bad_environment_variables_are_named(variables: Any, says: str) -> None:
    with pytest.raises(ValueError, match=r"^extra_env") as caught:
        check_environment(variables, "extra_env")
    assert says in str(caught.value)


def test_unusual_values_of_environment_variables_are_accepted() -> None:
    odd = {"A": "line\nbreak; $HOME 'quote' \"double\" ä ☃", "_b": ""}
    assert check_environment(odd, "extra_env") == odd


def test_importing_the_package_imports_neither_ray_nor_paramiko_nor_backends_nor_the_rpc_of_the_runtime() -> None:
    runtime = ("ctypes", "dagster_rayslurm.runtime.process", "dagster_rayslurm.runtime.protocol.rpc")
    late = ("ray", "paramiko", "dagster_rayslurm.operations", "dagster_rayslurm.backends", "dagster_rayslurm.follow", "pathspec")
    code = f"import dagster_rayslurm, sys; print([m for m in {(*late, *runtime)!r} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_the_library_is_registered_and_exports_its_names() -> None:
    from dagster._core.libraries import DagsterLibraryRegistry

    assert DagsterLibraryRegistry.get()["dagster-rayslurm"] == dagster_rayslurm.__version__
    assert all(hasattr(dagster_rayslurm, name) for name in dagster_rayslurm.__all__)


def test_a_variable_with_a_wrong_value_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RS_LOTS", "lots")
    compute = ComputeResource(
        mode="slurm", slurm=SlurmResource(ssh=SSHConnectionResource(host="edge")), pre_deployed_env_path="/env"
    )
    with pytest.raises(RunFailure) as caught:
        compute.job_script(payload_path=["true"], queue=SlurmQueueConfig(mem=dg.EnvVar("RS_LOTS")))
    assert str(caught.value.description).startswith("SlurmQueueConfig.mem: 'lots' is not a Slurm memory size; write ")
    assert "\n" not in str(caught.value.description)
