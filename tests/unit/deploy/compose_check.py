"""What can be said of docker-compose.yml and Dockerfile without Docker: each check yields problems, in words."""

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
import yaml
from botocore.credentials import EnvProvider

from nightmill import config
from nightmill.cli.main import cli
from nightmill.config import Settings
from nightmill.errors import ConfigError
from nightmill_worker.engine.stats import EngineStats
from nightmill_worker.fleet_process import HARD_STOP_S

ROOT = Path(__file__).parents[3]
_SERVICE_KEYS = frozenset(
    {
        *("build", "command", "depends_on", "deploy", "environment", "healthcheck", "hostname", "image", "init"),
        *("logging", "ports", "profiles", "restart", "shm_size", "stop_grace_period", "stop_signal", "volumes"),
    }
)
_HEALTH_KEYS = frozenset({"test", "interval", "timeout", "retries", "start_period"})
_CONDITIONS = frozenset({"service_started", "service_healthy", "service_completed_successfully"})
_RESTART = frozenset({"no", "always", "on-failure", "unless-stopped"})
_SECONDS = re.compile(r"(?:(\d+)m)?(?:(\d+)s)?")
_PINNED = re.compile(r"[a-z0-9./-]+:v?\d+\.\d+(\.\d+)?[a-z0-9.-]*")


@dataclass(frozen=True, slots=True)
class Deployment:
    """The files, parsed; a test may change one and look what is said."""

    compose: dict[str, Any]
    dockerfile: str
    prometheus: dict[str, Any]
    alerts: dict[str, Any]
    dashboard: str
    project: dict[str, Any]

    @classmethod
    def load(cls, **changed: str) -> "Deployment":
        """Read the repository's files; `compose=`, `dockerfile=`, `prometheus=`, `dashboard=` replace one's text."""
        text = {
            "compose": ROOT / "docker-compose.yml",
            "dockerfile": ROOT / "Dockerfile",
            "prometheus": ROOT / "deploy/prometheus.yml",
            "alerts": ROOT / "deploy/prometheus-alerts.yml",
            "dashboard": ROOT / "deploy/grafana/dashboards/nightmill.json",
        }
        texts = {name: path.read_text() for name, path in text.items()} | changed
        return cls(
            compose=yaml.safe_load(interpolate(texts["compose"])),
            dockerfile=texts["dockerfile"],
            prometheus=yaml.safe_load(texts["prometheus"]),
            alerts=yaml.safe_load(texts["alerts"]),
            dashboard=texts["dashboard"],
            project=tomllib.loads((ROOT / "pyproject.toml").read_text()),
        )

    @property
    def services(self) -> dict[str, dict[str, Any]]:
        """By name."""
        return dict(self.compose["services"])

    @property
    def ours(self) -> dict[str, dict[str, Any]]:
        """Services that run an image of this repository's Dockerfile."""
        return {name: service for name, service in self.services.items() if "build" in service}


def interpolate(text: str) -> str:
    """${NAME:-default} as Compose reads it where NAME is unset; any other form is left, and found as a problem."""
    return re.sub(r"\$\{[A-Z0-9_]+:-([^}]*)\}", r"\1", text)


def all_problems(deployment: Deployment) -> list[str]:
    """Everything that any check has to say."""
    checks = (schema, references, health, images, commands, settings, ports, grace, dockerfile, metrics)
    return [problem for check in checks for problem in check(deployment)]


def schema(deployment: Deployment) -> Iterator[str]:
    """Known keys, with values of the right kind."""
    if unknown := set(deployment.compose) - {"name", "services", "volumes", "x-nightmill"}:
        yield f"top level: unknown {sorted(unknown)}"
    if "${" in str(deployment.compose):
        yield "a variable without a default: `docker compose up` would start with an empty one"
    for name, service in deployment.services.items():
        if unknown := set(service) - _SERVICE_KEYS:
            yield f"{name}: unknown {sorted(unknown)}"
        if not isinstance(service.get("command", []), list):
            yield f"{name}: command is to be a list, a string goes through a shell's eyes"
        if service.get("restart") not in _RESTART:
            yield f"{name}: restart {service.get('restart')!r} is none of {sorted(_RESTART)}"
        for key, value in service.get("environment", {}).items():
            if not isinstance(value, str):
                yield f"{name}: {key} is {value!r}, which YAML does not read as text"


def references(deployment: Deployment) -> Iterator[str]:
    """What a service names is there."""
    for name, service in deployment.services.items():
        for other, how in service.get("depends_on", {}).items():
            if other not in deployment.services:
                yield f"{name}: depends on {other}, which is no service"
            elif how["condition"] not in _CONDITIONS:
                yield f"{name}: unknown condition {how['condition']}"
            elif how["condition"] == "service_healthy" and "healthcheck" not in deployment.services[other]:
                yield f"{name}: waits for the health of {other}, which has no healthcheck"
            elif not set(deployment.services[other].get("profiles", [])) <= set(service.get("profiles", [])):
                yield f"{name}: depends on {other}, which is behind a profile"
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("."):
                if not (ROOT / source).exists():
                    yield f"{name}: mounts {source}, which is not in the repository"
            elif source not in deployment.compose["volumes"]:
                yield f"{name}: volume {source} is not declared"
        target = service.get("build", {}).get("target")
        if target is not None and target not in _stages(deployment.dockerfile):
            yield f"{name}: the Dockerfile has no target {target}"


def health(deployment: Deployment) -> Iterator[str]:
    """Whatever runs on says whether it is well."""
    for name, service in deployment.services.items():
        check = service.get("healthcheck")
        if check is None:
            if service["restart"] == "unless-stopped" and name != "grafana":
                yield f"{name}: has no healthcheck"
            continue
        if unknown := set(check) - _HEALTH_KEYS:
            yield f"{name}: healthcheck has unknown {sorted(unknown)}"
        if check["test"][0] not in ("CMD", "CMD-SHELL"):
            yield f"{name}: healthcheck.test begins with {check['test'][0]!r}, not CMD or CMD-SHELL"


def images(deployment: Deployment) -> Iterator[str]:
    """No tag that means another image tomorrow."""
    bases = re.findall(r"^FROM (\S+)", deployment.dockerfile, re.MULTILINE)
    foreign = [base for base in bases if base not in _stages(deployment.dockerfile)]
    for image in [service["image"] for service in deployment.services.values()] + foreign:
        if not _PINNED.fullmatch(image):
            yield f"image {image!r} is not pinned to a version"
    version = deployment.project["project"]["version"]
    for name, service in deployment.ours.items():
        expected = f"nightmill:{version}-{service['build']['target']}"
        if service["image"] != expected:
            yield f"{name}: image {service['image']!r} is not {expected!r}"


def commands(deployment: Deployment) -> Iterator[str]:
    """Each command of ours is one that `nightmill` has, with options that it takes."""
    for name, service in deployment.ours.items():
        words = service["command"]
        context = click.Context(cli, info_name="nightmill")
        command = cli.get_command(context, words[0])
        if command is None:
            yield f"{name}: `nightmill {words[0]}` is no command"
            continue
        if service["build"]["target"] == "cli" and _module(command).startswith("nightmill_worker"):
            yield f"{name}: `nightmill {words[0]}` needs torch, which this image does not have"
        try:
            command.make_context(words[0], list(words[1:]), parent=context)
        except click.ClickException as error:
            yield f"{name}: `nightmill {' '.join(words)}`: {error.format_message()}"


def settings(deployment: Deployment) -> Iterator[str]:
    """Variables that the code reads, with values that it takes, naming hosts that are there."""
    source = "\n".join(path.read_text() for folder in ("jobs", "worker") for path in (ROOT / folder).rglob("*.py"))
    known = (
        {EnvProvider.ACCESS_KEY, EnvProvider.SECRET_KEY}
        | config._VARIABLES
        | set(re.findall(r'"([A-Z][A-Z0-9_]+)"', source))
    )
    environment = dict(re.findall(r"^ +([A-Z_]+)=(\S+)", deployment.dockerfile, re.MULTILINE))
    named = {key for key in environment if key.startswith("NIGHTMILL_")}
    for name, service in deployment.ours.items():
        variables = service["environment"]
        for key in sorted({*variables, *named} - known):
            yield f"{name}: nothing in the code reads {key}"
        try:
            Settings.from_env({**{key: environment[key] for key in named}, **variables})
        except ConfigError as error:
            yield f"{name}: {error.message}"
        for key, value in variables.items():
            host = urlsplit(str(value)).hostname
            if "://" in str(value) and host not in deployment.services:
                yield f"{name}: {key} names host {host}, which is no service"


def ports(deployment: Deployment) -> Iterator[str]:
    """The metrics' port is one number everywhere; nothing is open to other machines."""
    scraped = {
        (target, str(entry["port"]))
        for job in deployment.prometheus["scrape_configs"]
        for entry in job.get("dns_sd_configs", [])
        for target in entry["names"]
    }
    exposed = set(re.findall(r"^EXPOSE (\d+)", deployment.dockerfile, re.MULTILINE))
    for name, service in deployment.ours.items():
        words = service["command"]
        if words[0] != "worker":
            continue
        port = words[words.index("--metrics-port") + 1]
        if (name, port) not in scraped:
            yield f"{name}: serves metrics at {port}, where Prometheus does not look"
        if f"127.0.0.1:{port}/healthz" not in service.get("healthcheck", {"test": [""]})["test"][-1]:
            yield f"{name}: its healthcheck does not look at port {port}"
        if exposed != {port}:
            yield f"{name}: the Dockerfile exposes {sorted(exposed)}, the metrics are at {port}"
    for name, port in scraped:
        if name not in deployment.services:
            yield f"prometheus: scrapes {name}:{port}, which is no service"
    for name, service in deployment.services.items():
        for mapping in service.get("ports", []):
            if not mapping.startswith("127.0.0.1:"):
                yield f"{name}: port {mapping} is open to other machines"


def grace(deployment: Deployment) -> Iterator[str]:
    """Docker kills a worker only after it has had its grace time and its own hard stop."""
    for name, service in deployment.ours.items():
        words = service["command"]
        if words[0] != "worker":
            continue
        own = float(words[words.index("--grace") + 1]) + HARD_STOP_S
        minutes, seconds = _SECONDS.fullmatch(service.get("stop_grace_period", "10s")).groups()  # type: ignore[union-attr]
        if 60 * int(minutes or 0) + int(seconds or 0) <= own:
            yield f"{name}: stop_grace_period {service.get('stop_grace_period')} is not above {own:.0f} s"


def dockerfile(deployment: Deployment) -> Iterator[str]:
    """What it copies is there and passes .dockerignore, extras exist, and nobody runs as root."""
    text = deployment.dockerfile
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    for line in re.findall(r"^COPY (?!--)(.+)", text, re.MULTILINE):
        for source in line.split()[:-1]:
            if not (ROOT / source).exists():
                yield f"Dockerfile: copies {source}, which is not in the repository"
            elif f"!{source}" not in ignore:
                yield f"Dockerfile: copies {source}, which .dockerignore keeps out"
    extras = deployment.project["project"]["optional-dependencies"]
    for extra in re.findall(r"\[([a-z]+)\]\"", text):
        if extra not in extras:
            yield f"Dockerfile: installs the extra {extra}, which pyproject.toml does not have"
    scripts = deployment.project["project"]["scripts"]
    for program in re.findall(r'^ENTRYPOINT \["([^"]+)"', text, re.MULTILINE):
        if program not in scripts:
            yield f"Dockerfile: starts {program}, which pyproject.toml does not install"
    for name, stage in _stages(text).items():
        if any(service["build"]["target"] == name for service in deployment.ours.values()) and "USER " not in stage:
            yield f"Dockerfile: target {name} runs as root"
    torch = re.findall(r'"(torch[^"]*)"', text)
    for requirement in torch:
        if requirement not in extras["worker"]:
            yield f"Dockerfile: {requirement} is not what pyproject.toml asks for"


def metrics(deployment: Deployment) -> Iterator[str]:
    """Dashboards and alerts ask for metrics that workers have; a run of `make up` compares with a real worker."""
    source = (ROOT / "worker/nightmill_worker/metrics.py").read_text()
    known = set(re.findall(r'"(nightmill_[a-z_]+)"', source))
    known |= {f"nightmill_engine_{re.sub('_s$', '_seconds', field.name)}" for field in fields(EngineStats)}
    for name in sorted(asked_metrics(deployment)):
        if name.removesuffix("_total") not in known and name not in known:
            yield f"dashboards: no worker has the metric {name}"


def asked_metrics(deployment: Deployment) -> set[str]:
    """Our metrics that the dashboard and the alerts name."""
    return set(re.findall(r"\b(nightmill_[a-z_]+)", deployment.dashboard + str(deployment.alerts)))


def _module(command: click.Command) -> str:
    return getattr(command.callback, "__module__", "")


def _stages(text: str) -> dict[str, str]:
    """Name of each FROM … AS name, with the text up to the next FROM."""
    parts = re.split(r"^FROM \S+ AS (\S+)$", text, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))
