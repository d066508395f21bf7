"""Frames between the processes."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading

import msgspec
import pytest

from engine.messages import Abort, Add, FinishReason, FromCore, Output, Outputs, ToCore, TokenLogprobs
from engine.sampling_params import SamplingParams
from engine.wire import MAX_FRAME, frame, receive, receive_async

TO_CORE = msgspec.msgpack.Decoder(ToCore)
FROM_CORE = msgspec.msgpack.Decoder(FromCore)


def test_messages_survive_the_socket() -> None:
    params = SamplingParams(temperature=0.5, stop=("a", "b"), logit_bias={3: 1.5}, allowed_token_ids=(1, 2))
    sent = [Add("r", [1, 2], params, kv_transfer={"handle": {"x": [1]}}), Abort(["r"])]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        threading.Thread(target=ours.sendall, args=(b"".join(frame(m) for m in sent),)).start()
        assert [receive(theirs, TO_CORE) for _ in sent] == sent


def test_a_closed_socket_reads_as_none_even_within_a_frame() -> None:
    for sent in (b"", b"\x01", frame(Abort(["x"]))[:-1]):
        ours, theirs = socket.socketpair()
        with theirs:
            with ours:
                ours.sendall(sent)
            assert receive(theirs, TO_CORE) is None


def test_an_oversized_frame_is_refused_before_it_is_read() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(struct.pack("<I", MAX_FRAME + 1))
        with pytest.raises(ConnectionError, match="above the limit"):
            receive(theirs, TO_CORE)


def test_the_async_reader_sees_the_same() -> None:
    output = Output(
        "r", token_ids=[5], logprobs=[TokenLogprobs([5, 6], [-0.1, -2.0], 1)], finish_reason=FinishReason.STOP
    )
    sent = Outputs([output], running=1, waiting=0)

    async def read() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(frame(sent) + frame(sent)[:5])
        reader.feed_eof()
        assert await receive_async(reader, FROM_CORE) == sent
        assert await receive_async(reader, FROM_CORE) is None

    asyncio.run(read())
