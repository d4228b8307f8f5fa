"""The containers of a stack, through the `docker` command and whichever Compose there is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import StackError
from .settings import ACCOUNTING_SERVICES, ROOT, Settings

IMAGE_DIRECTORY = ROOT / "stack" / "image"
CA_VARIABLES = ("PIP_CERT", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE")


@dataclass(frozen=True)
class Container:
    """A container of the stack, as the engine tells of it."""

    id: str
    service: str
    image: str
    state: str
    health: str
    address: str

    @property
    def running(self) -> bool:
        """Whether its daemon is alive."""
        return self.state == "running"


class Cluster:
    """A stack's image and containers."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._compose = find_compose()
        self._ids: dict[str, str] = {}
        """Of containers that were asked something already; only Compose makes others of them."""

    def build(self) -> None:
        """Build the image, a second or less if nothing has changed.

        Raises:
            StackError: The build failed.
        """
        provide_ca(IMAGE_DIRECTORY / "ca", os.environ)
        tag = ["--tag", self.settings.image, "--build-arg", f"DEBIAN={self.settings.debian}"]
        # Attestations carry the time of the build: each would be another image, and replace all containers.
        done = _run(["docker", "build", *tag, str(IMAGE_DIRECTORY)], env={**os.environ, "BUILDX_NO_DEFAULT_ATTESTATIONS": "1"})
        if done.returncode != 0:
            raise StackError(f"The image {self.settings.image} could not be built; the end of the build says why:\n{_tail(done)}")

    def image_exists(self) -> bool:
        """Whether there is an image, of whatever age."""
        return _run(["docker", "image", "inspect", self.settings.image]).returncode == 0

    def up(self, keys: str) -> None:
        """Start what does not run and replace what has other settings or other keys."""
        if not self.settings.accounting:
            self._require(self.compose("rm", "--stop", "--force", *ACCOUNTING_SERVICES), "start")
        self._require(self.compose("up", "--detach", "--no-build", *self.settings.services, keys=keys), "start")

    def down(self) -> None:
        """Remove containers, networks and volumes."""
        self._require(self.compose("down", "--volumes", "--remove-orphans", "--timeout", "5"), "stop")

    def compose(self, *arguments: str, keys: str = "", capture: bool = True) -> subprocess.CompletedProcess[str]:
        """Run Compose on this stack."""
        self._ids.clear()
        settings = self.settings
        variables = {
            "RAYSLURM_STACK_IMAGE": settings.image,
            "RAYSLURM_STACK_ACCOUNTING": "on" if settings.accounting else "off",
            "RAYSLURM_STACK_SSH_PORT": str(settings.ssh_port),
            "RAYSLURM_STACK_DIR": str(settings.directory),
            "RAYSLURM_STACK_KEYS": keys,
        }
        command = [*self._compose, "--project-name", settings.project, "--file", str(ROOT / "docker-compose.yml")]
        return _run([*command, *arguments], env={**os.environ, **variables}, capture=capture)

    def containers(self) -> dict[str, Container]:
        """The containers that there are, running or not, by service."""
        label = f"label=com.docker.compose.project={self.settings.project}"
        ids = _run(["docker", "ps", "--all", "--quiet", "--filter", label]).stdout.split()
        if not ids:
            return {}
        found = [_container(each) for each in json.loads(_run(["docker", "inspect", *ids]).stdout or "[]")]
        return {container.service: container for container in found}

    def container(self, service: str) -> Container:
        """The container of a service.

        Raises:
            StackError: There is none.
        """
        containers = self.containers()
        if service not in containers:
            raise StackError(f"The stack has no container of {service}: start it with `make stack-up`.")
        return containers[service]

    def container_id(self, service: str) -> str:
        """The id of a service's container, which is asked for once.

        Raises:
            StackError: There is none.
        """
        if service not in self._ids:
            self._ids[service] = self.container(service).id
        return self._ids[service]

    def exec(
        self, service: str, argv: Sequence[str], user: str | None = None, check: bool = True, stdin: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in a service's container, as root or in a user's home.

        Raises:
            StackError: The command failed, if `check`.
        """
        who = ["--user", user, "--workdir", f"/home/{user}"] if user else []
        done = _run(["docker", "exec", "--interactive", *who, self.container_id(service), *argv], stdin=stdin)
        if check and done.returncode != 0:
            raise StackError(f"{' '.join(argv)} on {service} ended with {done.returncode}:\n{_tail(done)}")
        return done

    def log_tail(self, service: str, lines: int = 15) -> str:
        """The last lines that a service has said."""
        container = self.containers().get(service)
        return _tail(_run(["docker", "logs", "--tail", str(lines), container.id]), lines) if container else ""

    def _require(self, done: subprocess.CompletedProcess[str], verb: str) -> None:
        if done.returncode == 0:
            return
        said = done.stdout + done.stderr
        if "port is already allocated" in said or "address already in use" in said:
            raise StackError(
                f"Port {self.settings.ssh_port} of 127.0.0.1 is taken: set RAYSLURM_STACK_SSH_PORT to one that is free."
            )
        raise StackError(f"Compose could not {verb} the stack; it says why:\n{_tail(done)}")


def find_compose() -> list[str]:
    """The command of Compose, with an engine that answers behind it.

    Raises:
        StackError: Docker, its engine or Compose is not there for this user.
    """
    if not shutil.which("docker"):
        raise StackError(
            "There is no `docker` command: install Docker, on Debian with `apt-get install docker.io docker-compose`."
        )
    engine = _run(["docker", "version", "--format", "{{.Server.Version}}"], timeout=30)
    if engine.returncode != 0:
        if "permission denied" in engine.stderr.lower():
            raise StackError("This user may not use the Docker engine: join the group `docker` and log in again.")
        raise StackError(f"The Docker engine does not answer, start it with `systemctl start docker`: {_tail(engine, 1)}")
    if _run(["docker", "compose", "version"], timeout=30).returncode == 0:
        return ["docker", "compose"]
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    raise StackError(
        "Docker has no Compose: install it, on Debian with `apt-get install docker-compose`, elsewhere as docker-compose-plugin."
    )


def provide_ca(directory: Path, environ: Mapping[str, str]) -> None:
    """Hand the image's build the CA bundle that pip needs on this machine, if one is set.

    A bundle of an earlier build stays otherwise: a shell without the variable must not make another image.
    """
    bundles = [Path(environ[name]) for name in CA_VARIABLES if environ.get(name)]
    bundle = next((path for path in bundles if path.is_file()), None)
    target = directory / "bundle.pem"
    if bundle and not (target.exists() and target.read_bytes() == bundle.read_bytes()):
        shutil.copyfile(bundle, target)


def _container(inspected: dict[str, Any]) -> Container:
    state = inspected["State"]
    addresses = [network["IPAddress"] for network in inspected["NetworkSettings"]["Networks"].values()]
    return Container(
        id=inspected["Id"],
        service=inspected["Config"]["Labels"]["com.docker.compose.service"],
        image=inspected["Config"]["Image"],
        state=state["Status"],
        health=state.get("Health", {}).get("Status", ""),
        address=next(iter(addresses), ""),
    )


def _run(
    command: list[str],
    *,
    env: dict[str, str] | None = None,
    stdin: str = "",
    capture: bool = True,
    timeout: float | None = None,
) -> subprocess.CompletedProcess[str]:
    pipe = subprocess.PIPE if capture else None
    try:
        return subprocess.run(
            command, env=env, input=stdin, stdout=pipe, stderr=pipe, text=True, errors="replace", timeout=timeout
        )
    except subprocess.TimeoutExpired as expired:
        return subprocess.CompletedProcess(command, 124, "", f"no answer within {expired.timeout:.0f} s")


def _tail(done: subprocess.CompletedProcess[str], lines: int = 25) -> str:
    return "\n".join((done.stdout + done.stderr).strip().splitlines()[-lines:])
