"""docker-compose.yml and Dockerfile, read with the code beside them; each kind of mistake is planted once."""

import re

import pytest
from tests.unit.deploy.compose_check import ROOT, Deployment, all_problems

COMPOSE = (ROOT / "docker-compose.yml").read_text()
DOCKERFILE = (ROOT / "Dockerfile").read_text()
PROMETHEUS = (ROOT / "deploy/prometheus.yml").read_text()
DASHBOARD = (ROOT / "deploy/grafana/dashboards/nightmill.json").read_text()


def test_nothing_is_wrong() -> None:
    assert all_problems(Deployment.load()) == []


PLANTED = [
    ("compose", "restart: unless-stopped", "restart: maybe", "restart 'maybe' is none of"),
    ("compose", "    hostname: rabbitmq", "    hostnam: rabbitmq", "unknown ['hostnam']"),
    ("compose", "${POSTGRES_PASSWORD:-nightmill}", "${POSTGRES_PASSWORD}", "a variable without a default"),
    (
        "compose",
        'NIGHTMILL_S3_CONDITIONAL_WRITES: "no"',
        "NIGHTMILL_S3_CONDITIONAL_WRITES: no",
        "does not read as text",
    ),
    (
        "compose",
        "rabbitmq: {condition: service_healthy}",
        "rabbit: {condition: service_healthy}",
        "which is no service",
    ),
    ("compose", "./deploy/prometheus.yml:", "./deploy/prom.yml:", "is not in the repository"),
    ("compose", '"cache:/var', '"cach:/var', "volume cach is not declared"),
    ("compose", "target: cuda", "target: rocm", "no target rocm"),
    ("compose", "    healthcheck: *worker-health\n", "", "worker-gpu: has no healthcheck"),
    ("compose", "image: rabbitmq:4.0.5", "image: rabbitmq:latest", "'rabbitmq:latest' is not pinned"),
    ("compose", "image: rabbitmq:4.0.5", "image: rabbitmq", "'rabbitmq' is not pinned"),
    ("compose", "image: rabbitmq:4.0.5", "image: rabbitmq:4", "'rabbitmq:4' is not pinned"),
    ("compose", "nightmill:0.1.0-cuda", "nightmill:0.0.9-cuda", "is not 'nightmill:0.1.0-cuda'"),
    ("compose", 'command: ["migrate"]', 'command: ["migrates"]', "`nightmill migrates` is no command"),
    ("compose", '"--log-format"', '"--log-fmt"', "No such option"),
    ("compose", '"--metrics-port", "9102"', '"--metrics-port", "many"', "is not a valid"),
    (
        "compose",
        "NIGHTMILL_LOG_LEVEL: info",
        "NIGHTMILL_LOG_LEVL: info",
        "nothing in the code reads NIGHTMILL_LOG_LEVL",
    ),
    ("compose", "NIGHTMILL_LOG_LEVEL: info", "NIGHTMILL_LOG_LEVEL: loud", "'loud' is not one of"),
    ("compose", "AWS_ENDPOINT_URL_S3: http://s3", "AWS_ENDPOINT_URL_S3: http://minio", "names host minio"),
    ("compose", "AWS_ENDPOINT_URL_S3:", "AWS_S3_ENDPOINT:", "nothing in the code reads AWS_S3_ENDPOINT"),
    ("compose", "DATABASE_URL: postgresql:", "DATABASE_URL: mysql:", "DATABASE_URL"),
    ("compose", '"--metrics-port", "9102"', '"--metrics-port", "9103"', "where Prometheus does not look"),
    ("compose", "127.0.0.1:5432:5432", "5432:5432", "open to other machines"),
    ("compose", "stop_grace_period: 90s", "stop_grace_period: 1m10s", "is not above 70 s"),
    ("dockerfile", "python:3.11.15-slim-bookworm", "python:slim", "'python:slim' is not pinned"),
    ("dockerfile", "COPY kernels kernels", "COPY kernel kernel", "copies kernel, which is not in the repository"),
    ("dockerfile", "COPY kernels kernels", "COPY docs docs", ".dockerignore keeps out"),
    ("dockerfile", "[gpu]", "[cuda]", "installs the extra cuda"),
    ("dockerfile", 'ENTRYPOINT ["nightmill"]', 'ENTRYPOINT ["night"]', "starts night, which"),
    ("dockerfile", "USER nightmill\n", "", "target cpu runs as root"),
    ("dockerfile", "torch>=2.11,<2.14", "torch", "torch is not what pyproject.toml asks for"),
    ("dockerfile", "EXPOSE 9102", "EXPOSE 9103", "exposes ['9103']"),
    ("dockerfile", "NIGHTMILL_CACHE=", "NIGHTMILL_CASH=", "reads NIGHTMILL_CASH"),
    ("prometheus", "port: 9102", "port: 9101", "where Prometheus does not look"),
    ("prometheus", "worker-gpu", "worker-tpu", "scrapes worker-tpu:9102, which is no service"),
    ("dashboard", "nightmill_job_rows", "nightmill_jobs_rows", "no worker has the metric nightmill_jobs_rows"),
]


@pytest.mark.parametrize(("file", "right", "wrong", "said"), PLANTED)
def test_a_planted_mistake_is_found(file: str, right: str, wrong: str, said: str) -> None:
    text = {"compose": COMPOSE, "dockerfile": DOCKERFILE, "prometheus": PROMETHEUS, "dashboard": DASHBOARD}[file]
    assert right in text
    problems = all_problems(Deployment.load(**{file: text.replace(right, wrong)}))
    assert any(said in problem for problem in problems), problems


def test_every_variable_of_compose_is_explained_for_operators() -> None:
    guide = (ROOT / "docs/operations.md").read_text()
    asked = set(re.findall(r"\$\{([A-Z0-9_]+)", COMPOSE))
    assert {name for name in asked if f"`{name}`" not in guide} == set()
