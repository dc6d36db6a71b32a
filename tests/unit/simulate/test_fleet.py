import pytest
from click.testing import CliRunner

from nightmill_worker.cli.simulate import Duration, simulate
from nightmill_worker.engine.options import Policy
from nightmill_worker.simulate.cost_model import DEVICES, MODELS, CostModel
from nightmill_worker.simulate.fleet import devices_within
from nightmill_worker.simulate.simulation import Simulation, SimulationOptions
from nightmill_worker.simulate.trace import Trace

OPTIONS = SimulationOptions(cost=CostModel(DEVICES["cpu"], MODELS["smollm2-135m"]), max_num_seqs=8)
TRACE = Trace.of_lengths([(64, 16 + i % 48) for i in range(96)])


def alone(trace=TRACE, options=OPTIONS):
    return Simulation(trace, options, Policy.CONTINUOUS).run().recorder.clock_s


def test_one_device_is_enough_when_there_is_time():
    assert devices_within(TRACE, OPTIONS, alone() + 1, alone()).devices == 1


def test_the_answer_was_simulated_and_one_device_less_is_not_enough():
    within_s = alone() / 3
    fleet = devices_within(TRACE, OPTIONS, within_s, alone())
    assert fleet.is_enough
    assert fleet.seconds <= within_s
    assert fleet.devices > 3  # three would need parts without a tail
    rows = TRACE.rows
    parts = [Trace(rows[len(rows) * i // 3 : len(rows) * (i + 1) // 3]) for i in range(3)]
    assert max(alone(part) for part in parts) > within_s


def test_no_number_of_devices_makes_the_longest_answer_shorter():
    fleet = devices_within(Trace.of_lengths([(8, 4), (8, 400)]), OPTIONS, 1e-3, alone())
    assert not fleet.is_enough
    assert fleet.devices == 2


@pytest.mark.parametrize(("text", "seconds"), [("7h30m", 27_000.0), ("90m", 5400.0), ("45s", 45.0), ("1h1s", 3601.0)])
def test_durations(text, seconds):
    assert Duration().convert(text, None, None) == seconds


@pytest.mark.parametrize("text", ["", "7", "h", "-1h", "0s", "1.5h"])
def test_what_is_no_duration_is_a_usage_error(tmp_path, text):
    path = tmp_path / "t.csv"
    path.write_text("ContextTokens,GeneratedTokens\n10,10\n")
    result = CliRunner().invoke(simulate, ["--trace", str(path), "--within", text])
    assert result.exit_code == 2
    assert "90m" in result.output


def test_a_pool_too_small_is_helped_by_the_host_where_copies_are_cheap():
    model = MODELS["llama-3.1-8b"]  # 18 µs to compute a token again, 4.8 to copy its KV out and in
    trace = Trace.of_lengths([(256, 512)] * 32)

    def run(host_tokens):
        options = SimulationOptions(
            cost=CostModel(DEVICES["h200"], model),
            max_num_seqs=32,
            pool_tokens=8192,
            host_tokens=host_tokens,
            is_length_known=False,
            max_tokens=2000,
        )
        return Simulation(trace, options, Policy.CONTINUOUS).run()

    with_host, without = run(8192), run(0)
    assert with_host.stats.preemptions_swap > 0
    assert without.stats.preemptions_swap == 0 < without.stats.recomputed_tokens
    assert with_host.stats.recomputed_tokens < without.stats.recomputed_tokens
