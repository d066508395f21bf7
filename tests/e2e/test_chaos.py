"""Engines behind a router are killed while clients ask: `benchmarks/chaos.py`, in small."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

CHAOS = Path(__file__).parents[2] / "benchmarks" / "chaos.py"


@pytest.mark.slow
def test_clients_of_a_router_notice_no_death() -> None:
    small = ["--requests", "40", "--kills", "2", "--pause", "0.5", "--gap", "0.05", "--order", "02"]
    result = subprocess.run([sys.executable, str(CHAOS), *small], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "kills: {'prefill': 1, 'decode': 1}" in result.stdout
    assert re.search(r"remote: by configuration': \d+", result.stdout)
    assert re.search(r"'fetched': \d+", result.stdout)
    right = [int(count) for count in re.findall(r"(\d+)  right", result.stdout)]
    assert sum(right) >= 20
