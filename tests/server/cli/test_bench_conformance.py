"""`engine bench` is a plugin's command like any other."""

from __future__ import annotations

from engine.server.cli import bench
from engine.testing.cli_command import CLICommandConformance


class TestBench(CLICommandConformance):
    (offer,) = bench.cli_commands()
    module = "engine.server.cli.bench"
