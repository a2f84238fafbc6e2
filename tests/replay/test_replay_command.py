"""`headwater replay` as a command: JSON, a table, pictures, and error messages."""

import json
import sys

import pytest

from headwater.cli import main
from headwater.cli.machine_flags import PRESET_NAMES
from headwater.cli.replay import ROUTERS
from headwater.disagg.routing import POLICIES
from headwater.replay import charts
from headwater.replay.calibrate import calibrated
from headwater.replay.presets import PRESETS, preset
from headwater.replay.workload import at_speed, scaled
from tests.replay.traces import make_request

KEYS = {
    *("block_hit", "token_hit", "tokens_by_source", "misses_by_reason", "ttft_ms", "itl_ms"),
    *("throughput", "wall_s", "preemptions", "bytes_per_link", "over_time", "queue"),
}


def write_trace(path, num_requests=20):
    rows = [
        {
            "timestamp": 400 * n,
            "input_length": 1000 + n,
            "output_length": 1 + n % 7,
            "hash_ids": [0, 1 + n % 5, 10 + n],
        }
        for n in range(num_requests)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def trace(tmp_path):
    return write_trace(tmp_path / "trace.jsonl")


def test_json_has_what_is_promised_and_is_the_same_each_time(trace, capsys):
    """The JSON has the documented keys and percentiles, and equal bytes except for the wall
    time."""
    results = []
    for _ in range(2):
        flags = ["--host-gib", "2", "--slo", "ttft_p99=2s,itl_p99=1s", "--json"]
        assert main(["replay", trace, *flags]) == 0
        results.append(json.loads(capsys.readouterr().out))
    first, second = results

    assert set(first) >= KEYS
    assert set(first["ttft_ms"]) >= {"p50", "p90", "p99"} <= set(first["itl_ms"])
    assert first["slo"]["met"] is True
    assert first.pop("wall_s") > 0 < second.pop("wall_s")
    assert json.dumps(first) == json.dumps(second)


def test_the_table_says_where_tokens_came_from(trace, capsys):
    """The table is on standard output; standard error is empty without a terminal."""
    assert main(["replay", trace, "--instances", "2", "--slo", "ttft_p50=1us"]) == 0
    printed = capsys.readouterr()

    assert "20 requests on 2 x h200-8b" in printed.out
    assert "never_seen" in printed.out
    assert "NOT met" in printed.out
    assert printed.err == ""


def test_every_computed_token_has_a_reason(trace, capsys):
    """Tokens behind the last whole block have a reason, too, so that the rows of the table add
    up."""
    assert main(["replay", trace, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)

    missed = report["missed_tokens_by_reason"]
    assert sum(missed.values()) == report["tokens_by_source"]["computed"]


def test_the_report_has_the_roles_and_their_hand_offs(trace, capsys):
    """Hand-offs are in the table and in the JSON."""
    assert main(["replay", trace, "--pd", "1:2"]) == 0
    printed = capsys.readouterr().out
    assert "(1 prefill + 2 decode) x h200-8b" in printed
    assert "hand-offs" in printed

    assert main(["replay", trace, "--pd", "1:2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["handoffs"]["done"] > 0


def test_a_legend_stays_below_its_title():
    """As many labels as a chart can have fit into one row, which is above the axes, within
    their width and below the title."""
    figure = charts.new_figure(rows=2, columns=2)
    axes = figure.axes[0]
    axes.set_title("Sources of prompt tokens")
    for name in ("ceiling", "device", "host", "storage", "peer", "computed"):
        axes.plot([0, 1], label=name)
    charts.legend_above(axes)
    figure.draw_without_rendering()

    drawn = axes.get_legend()
    assert drawn is not None
    legend, title = drawn.get_window_extent(), axes.title.get_window_extent()
    frame = axes.get_window_extent()
    assert frame.y1 <= legend.y0
    assert legend.y1 <= title.y0
    assert legend.x1 <= frame.x1


def test_pictures_are_png_and_svg_and_the_same_each_time(trace, tmp_path, capsys):
    """A folder gets both formats, a file name one; an SVG does not contain the time of day."""
    pytest.importorskip("matplotlib")
    for folder in ("a", "b"):
        assert main(["replay", trace, "--picture", str(tmp_path / folder)]) == 0
    assert main(["replay", trace, "--picture", str(tmp_path / "one.svg")]) == 0
    capsys.readouterr()

    assert (tmp_path / "a" / "replay.png").read_bytes().startswith(b"\x89PNG")
    drawn = (tmp_path / "a" / "replay.svg").read_bytes()
    assert drawn == (tmp_path / "b" / "replay.svg").read_bytes()
    assert drawn == (tmp_path / "one.svg").read_bytes()
    assert main(["replay", trace, "--picture", str(tmp_path / "one.gif")]) == 1
    assert ".png or .svg" in capsys.readouterr().err


def test_nothing_is_drawn_where_no_request_was(tmp_path, capsys):
    """Sources of prompts have no values between two bursts, so that no line joins them."""
    pytest.importorskip("matplotlib")
    shape = {"input_length": 1000, "output_length": 1, "hash_ids": [0, 1]}
    rows = [{"timestamp": at, **shape} for at in (0, 100, 600_000)]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["replay", str(trace), "--json"]) == 0
    series = json.loads(capsys.readouterr().out)["hits_over_time"]
    figure = charts.new_figure(rows=1, columns=1)
    charts._draw_hits(figure.axes[0], series)

    bursts = sum(map(bool, series["prompt"]))
    assert bursts == 2
    assert [len(bars) for bars in figure.axes[0].containers] == [bursts, bursts]


@pytest.mark.parametrize(("last_s", "unit"), [(30.0, "seconds"), (1200.0, "minutes")])
def test_the_time_axis_has_the_unit_of_the_length_of_the_trace(last_s, unit):
    """A recording of half a minute is not drawn in thousandths of a minute."""
    series = {"t_s": [0.0, last_s], "prompt": [1, 1], "reusable": [0, 0]}
    sources = {name: [0, 0] for name in ("device", "host", "storage", "peer")}
    axes = charts.new_figure(rows=1, columns=1).axes[0]
    charts._draw_hits(axes, series | sources)

    assert axes.get_xlabel() == unit


@pytest.mark.parametrize("command", ["replay", "plan"])
def test_without_matplotlib_the_message_names_the_package(
    command, trace, tmp_path, capsys, monkeypatch
):
    """The message comes before the simulation, which may take minutes."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([command, trace, "--picture", str(tmp_path)]) == 1
    printed = capsys.readouterr()

    assert "headwater[plots]" in printed.err
    assert not printed.out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--limit", "0"], "--limit"),
        (["--speed", "0"], "--speed"),
        (["--scale", "-1"], "--scale"),
        (["--slo", "fast"], "for example"),
        (["--eviction", "opt"], "--cache-only"),
        (["--storage-gib", "5"], "--host-gib"),
        (["--instances", "0"], "at least 1 instance"),
        (["--pd", "1:x"], "such as 1:3"),
        (["--pd", "0:3"], "leaves out a role"),
        (["--calibrate", "absent.json"], "cannot read"),
    ],
)
def test_mistakes_in_settings_get_a_message(trace, flags, message, capsys):
    """There is one line on standard error, and the exit code is 1."""
    assert main(["replay", trace, *flags]) == 1
    printed = capsys.readouterr()

    assert message in printed.err
    assert printed.err.count("\n") == 1


def test_the_command_knows_every_machine_and_every_policy():
    """The offered values are those of the code, although it is not imported."""
    assert set(PRESET_NAMES) == set(PRESETS)
    assert ROUTERS == POLICIES


def test_help_teaches_by_example(capsys):
    """The help has commands that can be copied, and a link to the documentation."""
    with pytest.raises(SystemExit):
        main(["replay", "--help"])
    printed = capsys.readouterr().out

    assert "headwater replay trace.jsonl --host-gib 512" in printed
    assert "docs/replay.md" in printed


def test_speed_moves_arrivals_and_nothing_else():
    """Twice the speed halves the time between requests."""
    requests = [make_request([1, 2], at_s=10.0), make_request([1, 3], at_s=30.0)]

    assert [request.arrival_s for request in at_speed(requests, 2)] == [5.0, 15.0]
    assert at_speed(requests, 2)[0].hash_ids == [1, 2]


def test_scale_keeps_sessions_whole_and_adds_copies_that_share_nothing():
    """`--scale 0.5` keeps some sessions with all their requests. `--scale 2` adds as many
    sessions again, with other blocks."""
    sessions = {
        n: [make_request([n, 100 + n], at_s=float(n + k)) for k in (0, 50)] for n in range(40)
    }
    requests = sorted(
        (r for pair in sessions.values() for r in pair), key=lambda r: r.arrival_s
    )
    half = scaled(requests, 0.5, seed=1)
    kept = [request.hash_ids[0] for request in half]
    twice = scaled(requests, 2, seed=1)

    assert 20 < len(half) < 60
    assert all(kept.count(n) == 2 for n in kept)
    assert scaled(requests, 0.5, seed=1) == half != scaled(requests, 0.5, seed=2)
    assert len(twice) == 2 * len(requests)
    assert len({request.hash_ids[0] for request in twice}) == 80
    assert [r.arrival_s for r in twice] == sorted(r.arrival_s for r in twice)


def test_calibration_takes_what_a_result_has(tmp_path):
    """The expected figures were calculated by hand: decoding 10 ms + 1 ms per row; prompts 1 ms
    per token and 2 µs per pair; links."""
    machine = preset("cpu-100m")
    step = machine.step
    rows = [
        {
            "engine": "headwater",
            "model": "100m",
            "cache": True,
            "concurrency": n,
            "itl_p50_ms": 10 + n,
        }
        for n in (1, 8, 32)
    ]
    path = tmp_path / "serve.json"
    path.write_text(json.dumps({"rows": rows}))
    made = calibrated(machine, path)
    assert made.step.launch_s + made.step.weights_s == pytest.approx(0.010)
    assert made.step.row_s == pytest.approx(0.001 - 1024 * step.context_token_s)
    assert made.step.token_s == step.token_s
    assert made.links == machine.links

    times = {
        str(n): 1e3 * (step.launch_s + 1e-3 * n + 2e-6 * n * (n + 1) / 2) for n in (256, 1024)
    }
    hits = {"host": {"1024": 1.0, "2048": 2.0}}
    speeds = {"file": {"read": 3000.0, "write": 2000.0}}
    path = tmp_path / "tiers.json"
    path.write_text(
        json.dumps({"recompute_ttft_ms": times, "hit_ttft_ms": hits, "backend_mb_s": speeds})
    )
    made = calibrated(machine, path)
    assert made.step.token_s == pytest.approx(1e-3)
    assert made.step.pair_s == pytest.approx(2e-6)
    assert made.links["storage_to_host"].bytes_s == 3e9
    assert made.links["host_to_storage"].bytes_s == 2e9
    assert made.links["host_to_device"].bytes_s == pytest.approx(
        machine.kv_token_bytes * 1.024e6
    )
    assert made.name == "cpu-100m*"


def test_calibration_takes_the_result_of_a_gpu(tmp_path):
    """Calculated by hand, there are steps of 5 ms and 40 µs per row, of which 1,024 tokens of
    KV at 4,096 GB/s are 32.8 µs; prompts of 20 µs per token; copies at 50 GB/s that stretch
    steps by 2 %."""
    machine = preset("h200-8b")
    launch_s = machine.step.launch_s
    result = {
        "ceilings": {"memory_gb_s": 4096.0},
        "decode": {str(n): {"step_ms": 5 + 0.04 * n} for n in (1, 32, 256)}
        | {"continuous_128": {}},
        "prefill": {
            str(n): {"tokens_s": n / (launch_s + 2e-5 * n)} for n in (2048, 8192, 32768)
        },
        "copies": {"host_to_device": {"gb_s": 50.0, "p50_ratio": 1.02}, "batch": 128},
    }
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps(result))
    made = calibrated(machine, path)

    assert made.step.launch_s + made.step.weights_s == pytest.approx(5e-3)
    assert made.step.context_token_s == pytest.approx(3.2e-8)
    assert made.step.row_s == pytest.approx(4e-5 - 1024 * 3.2e-8)
    assert made.step.token_s == pytest.approx(2e-5)
    assert made.step.pair_s == pytest.approx(0, abs=1e-15)
    assert made.links["host_to_device"].bytes_s == 5e10
    assert made.links["host_to_device"].step_share == pytest.approx(0.02)
    assert made.links["device_to_host"] == machine.links["device_to_host"]


def test_calibration_refuses_what_it_cannot_use(trace, tmp_path, capsys):
    """The command refuses other JSON, no JSON, and figures that are not numbers."""
    path = tmp_path / "result.json"
    for text, message in (
        ("{}", "has no figures for the cost model"),
        ("[]", "must be one JSON object"),
        ("{", "is not JSON"),
        ('{"rows": [{"engine": "headwater"}]}', "missing or has the wrong type"),
    ):
        path.write_text(text)
        assert main(["replay", trace, "--calibrate", str(path)]) == 1
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_are_what_their_notes_say(name):
    """Steps of one row and of a whole prompt are within a tenth of the figures they come
    from."""
    step = preset(name).step
    measured = {
        "h200-8b": [
            (1, 1024, 4.20e-3),
            (32, 1024, 5.48e-3),
            (128, 1024, 8.97e-3),
            (256, 1024, 14.66e-3),
            (8192, None, 0.196),
            (32768, None, 1.135),
        ],
        "h200-8b-fp8-kv": [(1, 1024, 4.20e-3), (8192, None, 0.196)],
        "h200-30b-a3b": [
            (1, 1024, 2.862e-3),
            (32, 1024, 14.55e-3),
            (128, 1024, 19.23e-3),
            (8192, None, 0.194),
        ],
        "h200-deepseek-v2-lite": [
            (1, 1024, 2.699e-3),
            (32, 1024, 10.33e-3),
            (128, 1024, 12.99e-3),
            (8192, None, 0.406),
        ],
        "cpu-100m": [(1, 500, 32e-3), (1024, None, 2.2)],
    }
    for count, context, seconds in measured[name]:
        if context is None:
            pairs = count * (count + 1) // 2
            made = step.seconds(prompt_tokens=count, pairs=pairs, rows=0, context=0)
        else:
            made = step.seconds(prompt_tokens=0, pairs=0, rows=count, context=count * context)
        assert made == pytest.approx(seconds, rel=0.1)
