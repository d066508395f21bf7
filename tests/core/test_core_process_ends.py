"""The core's process from outside: what is told when it is killed, and that no order lets it linger."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from engine.client import CoreFailed, EngineClient
from engine.config.load import load_config


async def end_by(sent: signal.Signals) -> str:
    client = await EngineClient.spawn(load_config(None, []).config, Path("never-read"))
    client._process.send_signal(sent)
    with pytest.raises(CoreFailed) as failure:
        await client.wait_ready()
    await client.close()
    return str(failure.value)


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (signal.SIGKILL, "killed by SIGKILL: by somebody, or by the system when memory runs out"),
        (signal.SIGSEGV, "killed by SIGSEGV"),
    ],
)
def test_the_signal_that_killed_the_core_is_named(sent: signal.Signals, words: str) -> None:
    assert words in asyncio.run(end_by(sent))


def test_a_core_that_is_told_to_stop_while_it_imports_does_not_load_first() -> None:
    async def run() -> tuple[int | None, str]:
        client = await EngineClient.spawn(load_config(None, []).config, Path("never-read"))
        await client.close()
        return client._process.returncode, client.phase.name

    assert asyncio.run(run()) == (0, "starting")
