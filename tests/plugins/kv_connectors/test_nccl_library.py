"""NCCL's groups, without NCCL."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from engine.plugins.kv_connectors.nccl.library import IN_PROGRESS, SUCCESS, Library
from engine.transport.link import LinkLost


def library(calls: list[str], **results: int) -> Library:
    """A library that notes what is called."""

    def function(name: str) -> object:
        return lambda *args: calls.append(name) or results.get(name, SUCCESS)

    made = Library.__new__(Library)
    names = ("ncclGroupStart", "ncclSend", "ncclRecv", "ncclGroupEnd")
    made._nccl = SimpleNamespace(**{name: function(name) for name in names}, ncclGetErrorString=lambda _: b"bad luck")
    return made


def test_what_is_begun_together_is_one_group() -> None:
    calls: list[str] = []
    nccl = library(calls, ncclGroupEnd=IN_PROGRESS)
    with nccl.together():
        nccl.send(1, 2, 3, 0, 4)
        nccl.receive(1, 2, 3, 0, 4)
    assert calls == ["ncclGroupStart", "ncclSend", "ncclRecv", "ncclGroupEnd"]


@pytest.mark.parametrize("broken", ["ncclSend", "ncclGroupEnd"])
def test_a_group_ends_whatever_fails(broken: str) -> None:
    calls: list[str] = []
    nccl = library(calls, **{broken: 5})
    with pytest.raises(LinkLost, match="NCCL: bad luck"), nccl.together():
        nccl.send(1, 2, 3, 0, 4)
    assert calls[-1] == "ncclGroupEnd"
