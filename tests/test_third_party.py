"""Packages of strangers, installed with pip: the good one works, the broken and the foreign one harm nobody.

The good one is the plugin of docs/plugins.md, word for word, so that the page can't lie.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]

Engine = Callable[..., "subprocess.CompletedProcess[str]"]


def documented() -> dict[str, str]:
    """File name -> text of each file that the page shows."""
    page = (ROOT / "docs" / "plugins.md").read_text()
    return dict(re.findall(r"^`([\w.]+)`\n\n```\w+\n(.*?)^```", page, re.MULTILINE | re.DOTALL))


def variant(name: str, module: str, hooks: str = "v1") -> dict[str, str]:
    """The documented package under another name, with another module."""
    project = documented()["pyproject.toml"].replace("parrot", name).replace('hooks = "v1"', f'hooks = "{hooks}"')
    return {"pyproject.toml": project, f"engine_{name}.py": module}


PACKAGES = {
    "parrot": documented(),
    "broken": variant("broken", "import a_library_that_is_not_installed\n"),
    "foreign": variant("foreign", "raise SystemExit('my code must not run')\n", hooks="v99"),
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which pip installed the three packages; their sources lie beside it."""
    base = tmp_path_factory.mktemp("strangers")
    for name, files in PACKAGES.items():
        (base / name).mkdir()
        for file, text in files.items():
            (base / name / file).write_text(text)
    site = base / "site"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", str(site), *(str(base / name) for name in PACKAGES)], check=True)
    return site


@pytest.fixture(scope="module")
def engine(site: Path) -> Engine:
    """Runs the `engine` command in a process that sees the three packages."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        code = "from engine.server.cli.main import main; main()"
        return subprocess.run(
            [sys.executable, "-c", code, *arguments],
            capture_output=True,
            text=True,
            check=False,
            cwd=site.parent,
            env=os.environ | {"PYTHONPATH": str(site)},
        )

    return run


def listed(engine: Engine) -> dict[str, dict[str, Any]]:
    result = engine("plugins", "list", "--json")
    assert result.returncode == 0, result.stderr
    return {entry["name"]: entry for entry in json.loads(result.stdout)}


def test_all_three_are_listed_with_owner_and_state(engine: Engine) -> None:
    found = listed(engine)
    assert {name: (found[name]["distribution"], found[name]["state"]) for name in PACKAGES} == {
        "parrot": ("engine-parrot", "ok"),
        "broken": ("engine-broken", "broken"),
        "foreign": ("engine-foreign", "refused"),
    }
    assert found["broken"]["reason"].startswith(
        "ModuleNotFoundError: No module named 'a_library_that_is_not_installed'"
    )
    assert found["foreign"]["reason"].startswith("engine-foreign is written for hook API v99")
    assert found["kv_caches.radix"]["state"] == "ok"


def test_the_good_one_is_used_from_yaml(engine: Engine, tmp_path: Path) -> None:
    config = tmp_path / "engine.yaml"
    config.write_text(documented()["engine.yaml"])
    result = engine("plugins", "explain", str(config), "--json")
    assert result.returncode == 0, result.stderr
    speculator = json.loads(result.stdout)["parts"]["speculator"]
    assert (speculator["name"], speculator["distribution"]) == ("parrot", "engine-parrot 1.0.0")
    assert speculator["options"] == {"times": 2}


def test_the_good_one_passes_the_conformance_suite_as_documented(site: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_engine_parrot.py"],
        capture_output=True,
        text=True,
        check=False,
        cwd=site.parent / "parrot",
        env=os.environ | {"PYTHONPATH": str(site)},
    )
    assert result.returncode == 0, result.stdout


def test_its_options_are_checked_and_documented_like_ours(engine: Engine, tmp_path: Path) -> None:
    config = tmp_path / "engine.yaml"
    config.write_text("speculator:\n  use: parrot\n  options:\n    tims: 3\n")
    result = engine("config", "check", str(config))
    assert result.returncode == 2
    assert result.stderr.startswith(
        f"engine: {config}:4: speculator.options.tims is no known key; did you mean 'times'?"
    )
    assert "How often the last token is said again." in engine("plugins", "show", "parrot").stdout
    assert "speculators.parrot" in json.loads(engine("config", "schema").stdout)["$defs"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("broken", "the plugin 'broken' of engine-broken 1.0.0 is broken: ModuleNotFoundError"),
        ("foreign", "the plugin 'foreign' of engine-foreign 1.0.0 is refused: engine-foreign is written for hook API"),
    ],
)
def test_the_bad_ones_are_an_error_only_when_named(engine: Engine, name: str, said: str) -> None:
    assert engine("plugins", "explain").returncode == 0
    result = engine("plugins", "explain", "--set", f"speculator={name}")
    assert result.returncode == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr


def test_the_configuration_can_keep_it_out(engine: Engine) -> None:
    result = engine("plugins", "explain", "--set", "speculator=parrot", "--set", "plugins.deny=[parrot]")
    assert result.returncode == 2
    assert "the plugin 'parrot' of engine-parrot 1.0.0 is denied: plugins.deny names it" in result.stderr
