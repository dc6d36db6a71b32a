"""A pytest plugin: what passed and failed, on disk after every test, for a run that may be killed."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from bench.gpu.namespace import own_namespaces

# With pytest-xdist this is loaded by the workers, too. A first example compiles kernels.
own_namespaces()
settings.register_profile("gpu", deadline=None, derandomize=True)
settings.load_profile("gpu")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, help="where results go, as JSON")
    parser.addoption("--take", type=int, help="run the first so many tests only")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--record")
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Recorder(path), "nightmill-record")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    take = config.getoption("--take")
    if take is not None:
        config.hook.pytest_deselected(items=items[take:])
        items[take:] = []


class _Recorder:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._record: dict[str, Any] = {"passed": 0, "skipped": 0, "failed": {}, "slowest": {}}
        self._save()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._record["failed"][f"{report.nodeid} ({report.when})"] = _first_lines(report)
        elif report.skipped:
            self._record["skipped"] += 1
        elif report.when == "call":
            self._record["passed"] += 1
        self._record["slowest"][report.nodeid] = self._record["slowest"].get(report.nodeid, 0.0) + report.duration
        self._save()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._record["failed"][f"{report.nodeid} (collection)"] = str(report.longrepr)[-600:]
            self._save()

    def _save(self) -> None:
        scratch = self._path.with_suffix(".new")
        scratch.write_text(json.dumps(self._record))
        scratch.replace(self._path)


def _first_lines(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = f"{crash.path}:{crash.lineno}: {crash.message}" if crash is not None else str(report.longrepr)
    return "\n".join(text.splitlines()[:12])[:1500]
