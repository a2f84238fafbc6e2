"""The whole public conversation trace, within the documented time and memory."""

import json
import os
import subprocess
import sys

import pytest

from tests.replay.traces import TRACES, needs_traces

_SCRIPT = """
import contextlib, io, json, resource, sys, time
from headwater.cli import main
out = io.StringIO()
with contextlib.redirect_stdout(out):
    assert main(["replay", sys.argv[1], "--json"]) == 0
report = json.loads(out.getvalue())
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps([report["requests"], report["prompt_tokens"], time.process_time(), peak]))
"""


@needs_traces
@pytest.mark.nightly
def test_the_conversation_trace_takes_a_minute_of_one_core_at_most():
    """12,031 requests and 145 M prompt tokens take at most 60 s and 2 GiB in cache and
    scheduler. Processor time is measured, because other processes disturb it least."""
    trace = os.path.join(TRACES or "", "conversation_trace.jsonl")
    ran = subprocess.run(
        [sys.executable, "-c", _SCRIPT, trace], capture_output=True, text=True, check=True
    )
    requests, prompt_tokens, seconds, peak_bytes = json.loads(ran.stdout)

    assert (requests, prompt_tokens) == (12_031, 144_793_823)
    assert seconds <= 60
    assert peak_bytes < 2 << 30
