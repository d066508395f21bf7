"""`engine plugins lock` and `engine serve --locked`, in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ENGINE = [sys.executable, "-c", "from engine.server.cli.main import main; main()"]


def engine(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*ENGINE, *arguments], capture_output=True, text=True, check=False, cwd=folder)


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a lock of what is installed."""
    folder = tmp_path_factory.mktemp("locked")
    result = engine(folder, "plugins", "lock")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("engine.lock: ")
    return folder


def test_what_is_locked_may_start(locked: Path) -> None:
    """It goes on to the next thing, which is a source that doesn't exist."""
    result = engine(locked, "serve", "--port", "0", "--set", "model.source=path:nothing_here", "--locked")
    assert result.returncode == 3
    assert "no file or folder" in result.stderr


def test_anything_else_may_not(locked: Path) -> None:
    content = json.loads((locked / "engine.lock").read_text())
    (own,) = [each for each in content["distributions"] if each["name"] == "engine-llm"]
    own["hash"] = "sha256:" + "0" * 64
    own["plugins"].remove("kv_caches.radix")
    content["distributions"].append({"name": "gone", "version": "3.0", "hash": "", "plugins": ["gone"]})
    (locked / "other.lock").write_text(json.dumps(content))
    result = engine(locked, "serve", "--port", "0", "--locked", "other.lock")
    assert result.returncode == 2
    said = result.stderr.splitlines()
    assert [line.split(";")[0].partition(" (")[0] for line in said] == [
        "engine: other.lock: engine-llm 0.1.0 has other content",
        "engine: other.lock: gone 3.0 is locked, but none of its plugins",
        "engine: other.lock: engine-llm 0.1.0 brings what is not locked: kv_caches.radix",
    ]


def test_what_the_configuration_keeps_out_is_left_out(locked: Path) -> None:
    result = engine(locked, "plugins", "lock", "--set", "plugins.deny=[kv_caches.radix]", "-o", "-")
    names = [name for each in json.loads(result.stdout)["distributions"] for name in each["plugins"]]
    assert "kv_caches.paged" in names
    assert "kv_caches.radix" not in names


def test_a_configuration_in_the_place_of_the_lock_is_told(locked: Path) -> None:
    (locked / "engine.yaml").write_text("server: {port: 0}\n")
    result = engine(locked, "serve", "--locked", "engine.yaml")
    assert result.returncode == 2
    assert "write the configuration first: engine serve CONFIG --locked LOCK" in result.stderr


def test_a_place_that_cannot_be_written_is_named(locked: Path) -> None:
    result = engine(locked, "plugins", "lock", "-o", "missing/engine.lock")
    assert (result.returncode, result.stdout) == (3, "")
    assert result.stderr == (
        "engine: missing/engine.lock can't be written: No such file or directory; name another file with -o\n"
    )
