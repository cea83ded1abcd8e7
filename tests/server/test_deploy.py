"""The container file and the Kubernetes example: their syntax, and options and paths that the server has."""

import configparser
import json
import re
from pathlib import Path

import pytest
from typer.main import get_command

from penstock.cli import main

yaml = pytest.importorskip("yaml")
FOLDER = Path(__file__).parents[2] / "docs" / "deploy"
INSTRUCTIONS = {"FROM", "COPY", "RUN", "USER", "ENV", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD"}


def parsed(words):
    """Raise for words that ``penstock serve`` does not take."""
    serve = get_command(main).commands["serve"]
    return serve.make_context("serve", list(words), resilient_parsing=False).params


def test_the_container_file_runs_the_server():
    lines = [line.split(" ", 1) for line in (FOLDER / "Dockerfile").read_text().splitlines() if line and not line.startswith("#")]
    assert {name for name, _ in lines} <= INSTRUCTIONS
    found = dict(lines)
    assert found["ENTRYPOINT"].startswith('["penstock", "serve", ')
    assert parsed([*json.loads(found["ENTRYPOINT"])[2:], *json.loads(found["CMD"])])["host"] == "0.0.0.0"
    checked = json.loads(found["HEALTHCHECK"].partition(" CMD ")[2])
    assert checked[0] == "python"
    compile(checked[2], "HEALTHCHECK", "exec")
    extras = re.search(r"/source\[(.*?)\]", found["RUN"] + str(lines))[1].split(",")
    assert all(f"\n{one} = [" in (FOLDER.parents[1] / "pyproject.toml").read_text() for one in extras)


def test_the_service_of_systemd_runs_the_server():
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str
    unit.read_string((FOLDER / "penstock.service").read_text())
    words = unit["Service"]["ExecStart"].split()
    assert words[0].endswith("/bin/penstock")
    assert words[1] == "serve"
    params = parsed(words[2:])
    assert int(unit["Service"]["TimeoutStopSec"]) >= params["drain_seconds"] + 5
    assert str(params["states_folder"]) == f"/var/lib/{unit['Service']['StateDirectory']}"


def test_the_kubernetes_example_runs_two_replicas():
    deployment, service = yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())
    assert (deployment["kind"], deployment["apiVersion"], service["kind"]) == ("Deployment", "apps/v1", "Service")
    pod = deployment["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    params = parsed(container["args"])
    assert params["replicas"] == container["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert pod["spec"]["terminationGracePeriodSeconds"] >= params["drain_seconds"] + 5
    assert container["ports"][0]["containerPort"] == params["port"] == int(pod["metadata"]["annotations"]["prometheus.io/port"])
    assert service["spec"]["ports"][0]["targetPort"] == container["ports"][0]["name"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert [container[name]["httpGet"]["path"] for name in ("startupProbe", "readinessProbe", "livenessProbe")] == ["/health"] * 2 + [
        "/version"
    ]
    assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in pod["spec"]["volumes"]}
