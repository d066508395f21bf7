"""The executor of this process through the shared suite."""

from __future__ import annotations

from engine.plugins.executors import uniproc
from engine.testing.executor import ExecutorConformance


class TestUniproc(ExecutorConformance):
    (offer,) = uniproc.executors()
    module = "engine.plugins.executors.uniproc"
