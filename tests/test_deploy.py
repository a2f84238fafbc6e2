"""The files of `deploy/` except dashboards and alerts: parsed here, but not run. Building the
image and starting the unit need a machine with Docker's registry and systemd."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from headwater.cli.parser import build_parser

ROOT = Path(__file__).parents[1]
DOCKERFILE = (ROOT / "deploy/Dockerfile").read_text()
UNIT = (ROOT / "deploy/headwater.service").read_text()


def test_the_image_copies_what_there_is_and_starts_a_command_line_that_parses():
    """Every file named in COPY exists; the entry point's flags are real; the user is not
    root."""
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.M)
    (entry,) = re.findall(r"^ENTRYPOINT (\[.+\])$", DOCKERFILE, re.M)
    command = json.loads(entry)

    assert copied
    for name in " ".join(copied).split():
        assert (ROOT / name).exists(), name
    options = build_parser().parse_args(command[1:])
    assert (command[0], options.host) == ("headwater", "0.0.0.0")
    assert re.findall(r"^USER (\S+)$", DOCKERFILE, re.M) == ["headwater"]


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.gpu"])
def test_the_final_stage_of_an_image_has_a_compiler(name: str):
    """The kernels in C are compiled at the first start; without a compiler slower code is used."""
    final = (ROOT / "deploy" / name).read_text().rsplit("\nFROM ", 1)[1]

    assert re.search(r"^RUN apt-get update && apt-get install .*\bgcc\b", final, re.M)


def test_the_gpu_image_copies_what_there_is_and_serves_on_a_gpu():
    """The same checks hold for the other image, which is not built here."""
    text = (ROOT / "deploy/Dockerfile.gpu").read_text()
    (entry,) = re.findall(r"^ENTRYPOINT (\[.+\])$", text, re.M)
    for name in " ".join(re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.M)).split():
        assert (ROOT / name).exists(), name
    options = build_parser().parse_args(json.loads(entry)[1:])
    assert (options.host, options.device) == ("0.0.0.0", "cuda")
    assert re.findall(r"^USER (\S+)$", text, re.M) == ["headwater"]


def test_the_health_check_asks_the_port_and_the_path_that_are_served():
    """The check of the image is the cheap one without a key, at the default port."""
    port = build_parser().parse_args(["serve"]).port

    assert f"http://127.0.0.1:{port}/health" in DOCKERFILE
    assert f"EXPOSE {port}\n" in DOCKERFILE


def test_the_unit_starts_a_command_line_that_parses():
    """The operator's flags follow the command; the stop timeout of the unit is longer than a
    drain."""
    (start,) = re.findall(r"^ExecStart=(.+)$", UNIT, re.M)
    (stop_s,) = re.findall(r"^TimeoutStopSec=(\d+)$", UNIT, re.M)
    flags = start.replace("$HEADWATER_FLAGS", "/srv/model --port 8000").split()[1:]

    options = build_parser().parse_args(flags)

    assert (options.model, options.port) == ("/srv/model", 8000)
    assert int(stop_s) > options.drain_timeout + 10


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_reads_every_line_of_the_unit(tmp_path):
    """There is no unknown setting and no ignored value; only the path of the program
    differs."""
    unit = tmp_path / "headwater.service"
    unit.write_text(re.sub(r"^(ExecStart=)\S+", rf"\1{shutil.which('true')}", UNIT, flags=re.M))

    found = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)],
        capture_output=True,
        text=True,
        timeout=30,
    )

    assert "headwater.service" not in found.stderr + found.stdout, found.stderr
