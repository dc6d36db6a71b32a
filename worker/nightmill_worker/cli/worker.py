"""`nightmill worker`: takes shards of all jobs, from the broker and the store, until it is told to stop."""

import re
from typing import TYPE_CHECKING, Any

import click

from nightmill.cli.sections import SectionedCommand, section
from nightmill.config import Settings
from nightmill.records import EngineOptions, ModelSpec
from nightmill.states import Tier
from nightmill_worker.cli.run_options import engine_options, read_engine

if TYPE_CHECKING:
    from nightmill_worker.loaded_model import LoadedModel
    from nightmill_worker.model_host import LoadModel

EPILOG = """\b
Examples:
  nightmill worker --model demo --metrics-port 9102
  nightmill worker --slots high=2,normal=4,low=2 --grace 120 --log-format json

It needs DATABASE_URL and CELERY_BROKER_URL. SIGTERM, SIGINT, SIGQUIT and SIGHUP all drain: rows that run finish within
the grace time, the rest is given back with what is done of it. A second signal stops at once."""


class Slots(click.ParamType[Any]):
    """`high=2,normal=4,low=4`; a tier that is left out keeps its default, 0 takes none of it."""

    name = "slots"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse."""
        if not isinstance(value, str):
            return value
        from nightmill_worker.slots import DEFAULT_SLOTS

        slots = dict(DEFAULT_SLOTS)
        for item in filter(None, (part.strip() for part in value.split(","))):
            match = re.fullmatch(r"(high|normal|low)=(\d{1,3})", item)
            if match is None:
                self.fail(f"{item!r} is not tier=number, with a tier of {', '.join(tier.value for tier in Tier)}")
            slots[Tier(match[1])] = int(match[2])
        if not any(slots.values()):
            self.fail("at least one tier needs a slot")
        return slots


fleet_options = section(
    "Fleet",
    click.option("--model", metavar="MODEL", help="Serve jobs of this model only.  [default: whichever waits]"),
    click.option("--slots", type=Slots(), metavar="TIER=N,…", help="Shards at once.  [default: high=2,normal=4,low=4]"),
    click.option(
        "--slice", "slice_s", type=click.FloatRange(1), default=300.0, show_default=True, help="Seconds of a message."
    ),
    click.option(
        "--grace", type=click.FloatRange(0), default=60.0, show_default=True, help="Seconds to finish what runs."
    ),
    click.option("--metrics-port", type=click.IntRange(0, 65535), help="/metrics and /healthz; 0: a free port."),
    click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True),
    click.option("--lease-ttl", type=click.FloatRange(1), default=30.0, hidden=True),
    click.option("--step-timeout", type=click.FloatRange(0.1), default=None, hidden=True),
    click.option("--fake-engine", metavar="SCRIPT", hidden=True, help="See scripted_engine.py."),
)


@click.command(cls=SectionedCommand, epilog=EPILOG)
@fleet_options
@engine_options
def worker(**flags: Any) -> int:
    """Work on the jobs of a fleet: several shards of several jobs and tiers in one engine."""
    settings = Settings.from_env()
    from nightmill.logs import set_up_logs
    from nightmill_worker.drain import Drain
    from nightmill_worker.fleet_process import SIGNALS, FleetWorker, end_process

    drain = Drain(flags["grace"])
    with drain.signals(SIGNALS):
        fleet = FleetWorker(_options(flags), settings, _loader(flags, settings), drain)
        set_up_logs(flags["log_format"], settings.log_level, fleet.worker_id)
        code = fleet.run()
    end_process(code)
    return code


def _options(flags: dict[str, Any]) -> Any:
    from nightmill_worker.engine_session import RunOptions
    from nightmill_worker.fleet_process import WorkerOptions
    from nightmill_worker.liveness import Limits
    from nightmill_worker.service import DEFAULT_STEP_TIMEOUT_S
    from nightmill_worker.slots import DEFAULT_SLOTS

    step_timeout_s = flags["step_timeout"] or DEFAULT_STEP_TIMEOUT_S
    return WorkerOptions(
        run=RunOptions(engine=read_engine(flags), in_process=flags["in_process"], step_timeout_s=step_timeout_s),
        only_model=flags["model"],
        slots=flags["slots"] or dict(DEFAULT_SLOTS),
        slice_s=flags["slice_s"],
        lease_ttl_s=flags["lease_ttl"],
        metrics_port=flags["metrics_port"],
        limits=Limits(step_s=step_timeout_s + 60),
    )


def _loader(flags: dict[str, Any], settings: Settings) -> "LoadModel":
    if flags["fake_engine"]:
        from nightmill_worker.scripted_engine import Script, scripted_model

        return scripted_model(Script.parse(flags["fake_engine"]), settings.cache)
    return _real_loader(read_engine(flags), pins=not flags["in_process"])


def _real_loader(engine: EngineOptions, *, pins: bool) -> "LoadModel":
    import logging

    from nightmill_worker.cores import limit_feeder
    from nightmill_worker.loaded_model import load_model

    log = logging.getLogger(__name__)

    def load(spec: ModelSpec) -> "LoadedModel":
        model = load_model(spec, engine, progress=log.info, pins=pins)
        if model.cores is not None:
            limit_feeder(model.cores)
        return model

    return load
