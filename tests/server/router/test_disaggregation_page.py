"""What docs/disaggregation.md and examples/disaggregated say is so."""

from __future__ import annotations

import configparser
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from engine.config.load import load_config
from engine.config.reference import table
from engine.server.cli.route import command as route
from engine.server.cli.serve import _role_overrides
from engine.server.cli.serve import command as serve
from engine.server.router.config import RouterConfig, load_router

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "disaggregated"
PAGE = (ROOT / "docs" / "disaggregation.md").read_text()


def test_the_table_of_keys_is_what_the_model_says() -> None:
    assert table(RouterConfig) in PAGE, "replace the table by engine.config.reference.table(RouterConfig)"


def test_the_configurations_are_valid(tmp_path: Path) -> None:
    (example,) = re.findall(r"```yaml\n(server.*?)```", PAGE, re.DOTALL)
    (tmp_path / "router.yaml").write_text(example)
    assert len(load_router(tmp_path / "router.yaml").decode) == 2
    assert load_router(EXAMPLE / "router.yaml").prefill == ["http://127.0.0.1:8101"]
    assert load_config(EXAMPLE / "engine.yaml").config.kv_connectors[0].use == "local"


def documents() -> list[dict[str, Any]]:
    return [*yaml.safe_load_all((EXAMPLE / "kubernetes.yaml").read_text())]


def test_the_configurations_in_kubernetes_are_valid(tmp_path: Path) -> None:
    (data,) = [document["data"] for document in documents() if document["kind"] == "ConfigMap"]
    for name, text in data.items():
        (tmp_path / name).write_text(text)
    router = load_router(tmp_path / "router.yaml")
    services = {document["metadata"]["name"] for document in documents() if document["kind"] == "Service"}
    assert {url.split(".")[1].partition(":")[0] for url in [*router.prefill, *router.decode]} <= services
    assert load_config(tmp_path / "engine.yaml").config.server.host == "0.0.0.0"


def test_the_probes_in_kubernetes_exist_and_no_delay_is_guessed(start_server: Any) -> None:
    text = (EXAMPLE / "kubernetes.yaml").read_text()
    assert "initialDelaySeconds" not in text
    paths = set(re.findall(r"path: (/health/\w+)", text))
    assert paths == {"/health/startup", "/health/live", "/health/ready"}
    with start_server() as live:
        assert {live.http.get(path).status_code for path in paths} == {200}


def test_the_commands_in_the_units_and_pods_exist() -> None:
    units = [path.read_text() for path in EXAMPLE.glob("*.service")]
    lines = [command.split() for unit in units for command in re.findall(r"ExecStart=\S+ (.*)", unit)]
    lines += [
        container["args"]
        for document in documents()
        for container in document.get("spec", {}).get("template", {}).get("spec", {}).get("containers", ())
    ]
    assert len(lines) == 5
    known = {"serve": serve, "route": route}
    for name, *rest in lines:
        options = {option for parameter in known[name].params for option in parameter.opts}
        assert {word for word in rest if word.startswith("--")} <= options
    for unit in units:
        parser = configparser.RawConfigParser(strict=False)
        parser.read_string(unit)
        assert parser["Service"]["Restart"] == "always"


@pytest.mark.parametrize(("role", "connector"), [("prefill", "producer"), ("decode", "consumer"), ("both", "both")])
def test_the_role_is_that_of_every_connector(role: str, connector: str) -> None:
    given = ["kv_connectors=[local, {use: faulty, role: both}]"]
    loaded = load_config(None, given)
    found = load_config(None, [*given, *_role_overrides(loaded, role)]).config.kv_connectors
    assert [section.role for section in found] == [connector, connector]


def test_a_role_needs_a_connector() -> None:
    result = CliRunner().invoke(serve, ["--role", "prefill"])
    assert "--role prefill needs a KV connector" in str(result.exception)


def cluster(folder: Path, *commands: str) -> list[str]:
    """The script of the example as it stands, over other commands."""
    program = (EXAMPLE / "cluster.py").read_text()
    made = [[sys.executable, "-c", command] for command in commands]
    script = folder / "cluster.py"
    script.write_text(program.replace("\n\nif __name__", f"\n\nCOMMANDS = {made}\nif __name__"))
    return [sys.executable, str(script)]


WAITING = r"import os, time; time.sleep(1); os.write(1, b'up\n'); time.sleep(600)"  # one write, not two that may mix


def test_the_cluster_ends_with_its_parts(tmp_path: Path) -> None:
    assert subprocess.run(cluster(tmp_path, WAITING, "pass"), check=False, timeout=60).returncode == 1


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_cluster(tmp_path: Path, how: signal.Signals) -> None:
    process = subprocess.Popen(cluster(tmp_path, WAITING, WAITING), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(2):
        assert process.stdout.readline() == "up\n"
    process.send_signal(how)
    assert process.wait(60) == 0
    assert process.stdout.read() == ""  # the parts are gone, too: nobody holds the pipe any more
