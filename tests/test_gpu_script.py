"""`scripts/gpu` and `scripts/gpu-record`: planning, limits, going on, and figures from files."""

import importlib.machinery
import importlib.util
import json
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from benchmarks.gpu_plan import PARTS, GpuPart, chosen_parts, next_part
from benchmarks.gpu_record import TABLES, record
from benchmarks.gpu_targets import TARGETS, print_targets, read_report

from headwater.bench import gpu
from headwater.bench._gpu_load import LoadResult
from tests.gpu_sample import SAMPLE

ROOT = Path(__file__).parents[1]


def write(folder, name, **changes):
    """The file of a part, as `headwater bench gpu --out` writes it."""
    content = {
        "part": name,
        "status": "done",
        "commit": "abc1234",
        "date": "2026-11-20",
        "machine": "one NVIDIA H200",
        "command": f"python -m headwater.bench gpu --parts {name}",
        "settings": {"model": "8b", "device": "cuda", "quick": False},
        "result": SAMPLE[name],
        **changes,
    }
    (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")


@pytest.fixture
def script():
    """The program scripts/gpu as a module."""
    loader = importlib.machinery.SourceFileLoader("gpu_script", str(ROOT / "scripts" / "gpu"))
    spec = importlib.util.spec_from_loader("gpu_script", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.fixture
def options(tmp_path):
    """Options of scripts/gpu on a CPU."""
    return Namespace(
        out=tmp_path,
        limit_s=float("inf"),
        skip_done=True,
        quick=False,
        device="cpu",
        trace=None,
        model_folder=tmp_path / "model",
        commit="abc1234",
    )


def test_the_plan_has_every_part_and_every_gpu_test_once():
    """No part of the benchmark and no file of GPU tests is forgotten."""
    files = [name for part in PARTS for name in part.tests]
    assert sorted(files) == sorted(
        file.name for file in ROOT.glob("tests/device/test_gpu_*.py")
    )
    assert sorted(part.name for part in PARTS if not part.tests) == sorted(gpu.PARTS)


def test_parts_run_in_the_order_in_which_they_are_named():
    """A part that prepares files runs before the part that needs them; `tests` stands for all
    tests."""
    assert [part.name for part in chosen_parts(["sessions", "json", "http"])] == [
        "model_files",
        "sessions",
        "json",
        "http",
    ]
    assert all(part.tests for part in chosen_parts(["tests"]))
    assert chosen_parts([]) == list(PARTS)
    with pytest.raises(ValueError, match="no part 'jsn'"):
        chosen_parts(["jsn"])


def test_a_part_that_does_not_fit_is_passed_over():
    """A shorter part is run instead; a part whose files are missing waits for them."""
    long = GpuPart(name="long", needs_s=100, limit_s=300)
    files = GpuPart(name="files", needs_s=40, limit_s=60)
    short = GpuPart(name="short", needs_s=10, limit_s=30, after="files")
    parts = [long, files, short]
    assert next_part(parts, (), 500) is long
    assert next_part(parts, (), 50) is files
    assert next_part(parts, (), 20) is None
    assert next_part(parts, {"files"}, 20) is short
    assert next_part(parts, {"long", "files", "short"}, 500) is None


def test_every_target_takes_its_figure_from_the_results(tmp_path, capsys):
    """A key that no part has would be shown as `not measured`."""
    for name in SAMPLE:
        write(tmp_path, name)
    print_targets(tmp_path, set(SAMPLE))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == sum(len(target.checks) for target in TARGETS)
    assert [line for line in lines if line.startswith("not measured")] == []
    assert any(line.startswith("MISSED 0.68 >= 0.8") for line in lines)
    assert any(line.startswith("reached 7.5 <= 8") for line in lines)


def test_targets_of_parts_without_a_file_are_not_measured(tmp_path, capsys):
    """Only targets of the chosen parts are printed."""
    print_targets(tmp_path, {"json", "tests-kernels"})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["not measured >= 0.93", "not run"]


def test_every_table_is_recorded_from_results(tmp_path):
    """Each recorded table has as many cells in a row as columns, the commit, and its
    targets."""
    folder, target = tmp_path / "out", tmp_path / "results"
    folder.mkdir()
    target.mkdir()
    for name in SAMPLE:
        write(folder, name)
    assert record(folder, target) == [f"{table.file}: written" for table in TABLES]
    for file in target.glob("*.json"):
        found = json.loads(file.read_text(encoding="utf-8"))
        assert (found["commit"], found["date"]) == ("abc1234", "2026-11-20")
        assert found["rows"]
        assert all(len(row) == len(found["columns"]) for row in found["rows"])
        assert len(found["targets"]) == sum(each.file == file.stem for each in TARGETS)


def test_the_time_of_a_prompt_is_recorded_beside_decodes(tmp_path):
    """Mixtures of experts and models with latent KV have a row for a prompt of 8,192 tokens."""
    write(tmp_path, "mla")
    target = tmp_path / "results"
    target.mkdir()
    record(tmp_path, target)
    rows = json.loads((target / "gpu-mla.json").read_text(encoding="utf-8"))["rows"]
    assert [row[1] for row in rows] == 2 * [1, 32, 128, "prompt of 8,192"]


def test_every_target_belongs_to_a_table():
    """A target without a table would be on no page."""
    assert {target.file for target in TARGETS} <= {table.file for table in TABLES}


def test_every_gpu_page_is_recorded_by_the_script():
    """A table of the page that the script cannot write would become outdated. `gpu-shapes` needs other
    models."""
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"<!-- results: (gpu-[\w-]+) -->", page))
    assert shown - {table.file for table in TABLES} == {"gpu-shapes"}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"status": "stopped"}, "json stopped"),
        ({"commit": None}, "has no commit"),
        ({"settings": {"quick": True, "device": "cuda"}}, "--quick"),
        ({"settings": {"quick": False, "device": "cpu"}}, "on a CPU"),
        ({"result": {"free": {}}}, "KeyError"),
    ],
)
def test_a_part_that_proves_nothing_is_not_recorded(tmp_path, changes, reason):
    """The table of such a part stays as it is, and a line says why."""
    write(tmp_path, "json", **changes)
    target = tmp_path / "results"
    target.mkdir()
    (line,) = record(tmp_path, target)
    assert line.startswith("gpu-json: not written")
    assert reason in line
    assert list(target.iterdir()) == []


def test_parts_of_two_commits_are_not_recorded_together(tmp_path):
    """A ratio of two commits means nothing."""
    for name in ("http", "mixed", "first_wave", "streams"):
        write(tmp_path, name, commit="abc1234" if name == "http" else "def5678")
    target = tmp_path / "results"
    target.mkdir()
    lines = record(tmp_path, target)
    assert "gpu-streams: written" in lines
    assert any(
        line.startswith("gpu-http: not written") and "several commits" in line for line in lines
    )


def test_a_later_call_goes_on_where_an_earlier_one_ended(script, options, tmp_path, capsys):
    """Parts that are done for this commit are not run again; others are not started without
    the time they need."""
    write(tmp_path, "json")
    write(tmp_path, "quant", commit="def5678")
    options.limit_s = 30.0
    assert script.run(chosen_parts(["json", "quant"]), options) == ["quant"]
    printed = capsys.readouterr().out
    assert "done before: json" in printed
    assert "quant: not started" in printed


@pytest.mark.slow
def test_a_part_that_is_stopped_keeps_its_file_and_leaves_no_process(script, options, tmp_path):
    """SIGTERM reaches the benchmark, which stops its server and says `stopped`."""
    part = GpuPart(name="mixed", needs_s=1, limit_s=5)
    assert not script.run_part(part, 5.0, options)
    content = json.loads((tmp_path / "mixed.json").read_text(encoding="utf-8"))
    assert content["status"] == "stopped"
    assert script.marked("mixed") == []


@pytest.mark.slow
def test_server_parts_run_on_a_cpu(script, options, tmp_path):
    """The same code as on a GPU gives figures for the same keys."""
    parts = chosen_parts(["sessions", "http"])
    assert script.run(parts, options) == []
    for name in ("sessions", "http"):
        found = json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8"))["result"]
        keys = {re.sub(r"\d+$", "N", key) for key in found}
        assert keys == {re.sub(r"\d+$", "N", key) for key in SAMPLE[name]}


def test_tests_without_a_gpu_are_told_as_skipped(script, options, tmp_path):
    """A skipped test is not a passed one."""
    part = GpuPart(name="tests-x", needs_s=1, limit_s=60, tests=("test_gpu_slots.py",))
    assert not script.run_part(part, 60.0, options)
    assert json.loads((tmp_path / "tests-x.json").read_text())["status"] == "skipped"


def test_a_report_of_tests_names_the_failed_ones(tmp_path):
    """Counts and names come from pytest's own report."""
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite tests="3" failures="1" errors="0" skipped="1">'
        '<testcase classname="a" name="x"/><testcase classname="a" name="y"><failure/></testcase>'
        '<testcase classname="a" name="z"><skipped/></testcase></testsuite></testsuites>'
    )
    assert read_report(report) == {"passed": 1, "failed": 1, "skipped": 1, "names": ["a.y"]}
    assert read_report(tmp_path / "missing.xml") == {}


def test_without_a_gpu_the_benchmark_says_what_it_skips():
    """The message names the parts."""
    command = [sys.executable, "-m", "headwater.bench", "gpu", "--parts", "json,quant"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "skipped: json, quant" in done.stderr


def test_gaps_count_only_while_every_request_decodes():
    """Gaps before the last first token and after the first end are left out."""
    load = LoadResult(
        seconds=1.0,
        tokens=8,
        first_s=[0.1, 0.1],
        events_s=[[0.0, 0.5, 0.51, 0.52], [0.5, 0.52, 0.54, 0.9]],
    )
    found = load.summary_together()
    assert found["gaps"] == 3
    assert found["itl_p50_ms"] == pytest.approx(10.0)
    assert found["itl_p99_ms"] == pytest.approx(20.0, abs=0.5)
