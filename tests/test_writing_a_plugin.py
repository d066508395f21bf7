"""The commands of docs/writing-a-plugin.md, as they stand there, in an empty folder.

They run in an environment of their own, which sees what is installed here, so that pip has nothing to fetch.
"""

from __future__ import annotations

import json
import os
import re
import site
import socket
import subprocess
import sys
import venv
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "writing-a-plugin.md"

PROGRAMS = {
    "engine": "from engine.server.cli.main import main; main()",
    "pip": "from pip._internal.cli.main import main; raise SystemExit(main())",
    "pytest": "import pytest; raise SystemExit(pytest.main())",
}

OFFLINE = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_QUIET": "1"}
"""0 is how pip spells "without isolation" here."""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A virtual environment on top of the present one, as variables."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    here = [path for path in sys.path if path in site.getsitepackages()]
    (packages / "parent.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in here))
    for name, code in PROGRAMS.items():
        program = folder / "bin" / name
        program.write_text(f"#!{folder / 'bin' / 'python'}\n{code}\n")
        program.chmod(0o755)
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | OFFLINE | {"PATH": path}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
    return port


@pytest.mark.slow
def test_the_walk_from_an_empty_folder_to_a_served_request(environment: dict[str, str], tmp_path: Path) -> None:
    blocks = re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) >= 5
    script = "set -e\n" + "echo '-----'\n".join(blocks).replace("8123", str(free_port())) + "wait || true\n"
    result = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, check=False, cwd=tmp_path, env=environment
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    written, shown, checked, explained, served, locked = result.stdout.split("-----\n")
    assert "my-backend/my_backend/backend.py" in written
    assert re.search(r"^my-backend +my-backend +0\.1\.0 +v1 +ok +my-backend$", shown, re.MULTILINE)
    assert "my-backend: attention backend" in shown
    assert "masks:sliding_window" in checked
    assert ", 0 failed," in checked
    assert re.search(r"my-backend +taken", explained)
    (answer,) = [json.loads(line) for line in served.splitlines() if line.startswith("{")]
    assert answer["choices"][0]["text"].startswith(" Paris")
    (entry,) = [entry for entry in json.loads(locked.partition("\n")[2]) if entry["name"] == "my-backend"]
    assert entry["state"] == "ok"
    assert '"name": "my-backend"' in (tmp_path / "engine.lock").read_text()
