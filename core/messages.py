"""What passes between the HTTP process and the engine core process: msgpack frames over one Unix socket pair.

Each frame is a 4-byte little-endian length and one encoded message. End of file means that the other side is gone.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from engine.sampling_params import SamplingParams


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"  # an end-of-sequence or stop token
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position, from the raw logits: the chosen token first, then the best in order."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int  # of the chosen token, 1 is the most likely


# From the HTTP side to the core


class Start(msgspec.Struct, frozen=True, tag="start"):
    """First message: the validated configuration and where the model's files lie."""

    config: dict[str, Any]
    model_path: str


class Add(msgspec.Struct, frozen=True, tag="add"):
    """A request enters."""

    request_id: str
    prompt: list[int]
    params: SamplingParams
    priority: int = 0  # lower is earlier
    cache_salt: str = ""
    kv_transfer: dict[str, Any] | None = None
    tenant: str = ""  # who asks; what a fair scheduling policy shares between
    weight: float = 1.0  # the tenant's share


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Nobody waits for these requests any more."""

    request_ids: list[str]


class Control(msgspec.Struct, frozen=True, tag="control"):
    """A verb of `engine.control`, or `shutdown`; answered by a Reply with the same number (but for shutdown)."""

    number: int
    verb: str
    arguments: dict[str, Any] = {}


# From the core to the HTTP side


class Phase(msgspec.Struct, frozen=True, tag="phase"):
    """How far the start has come."""

    name: str  # "composing", "loading weights", "allocating KV", "warming up", "ready"
    progress: float  # 0..1 within the phase
    detail: str = ""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The core accepts requests."""

    max_context: int
    num_pages: int
    page_size: int
    max_running: int
    max_waiting: int
    info: dict[str, Any]  # what was composed and why, for people


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The core can't start, or a step failed beyond repair; the process ends after this."""

    message: str


class Timing(msgspec.Struct, frozen=True):
    """Where the time of a request went in the core, in seconds. Queue, prefill and decode add up to all of it."""

    queue: float  # from its arrival to its admission
    prefill: float  # from there to the first token: its own prompt, and the steps it shared
    decode: float  # from there to the end
    preemptions: int = 0
    preempted: float = 0.0  # of prefill and decode: waited for pages after a preemption
    stalled: float = 0.0  # of decode: steps took longer because prompts of others were computed in them
    steps: int = 0  # from the first token to the end


class Output(msgspec.Struct, frozen=True, tag="output", omit_defaults=True):
    """News of one request. After a finish reason nothing more comes for its id."""

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    stop_token: int | None = None  # the stop token id that ended it, unless it was an ordinary end of sequence
    error: str = ""  # with `error`: a sentence for the client
    refused: bool = False  # with `error`: never admitted (queue full); may be retried
    invalid: bool = False  # with `error`: never admitted, and never will be: the request itself is at fault
    cached_tokens: int = 0  # prompt tokens that were not computed; valid from the first output on
    kv_transfer: dict[str, Any] | None = None  # with a finish: handle for the consumer
    timing: Timing | None = None  # with the first tokens and with the finish, unless it was never admitted


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    """All news of one step, with the load after it."""

    outputs: list[Output]
    running: int
    waiting: int


class Reply(msgspec.Struct, frozen=True, tag="reply"):
    """Answer to a Control."""

    number: int
    body: dict[str, Any]


ToCore = Start | Add | Abort | Control
FromCore = Phase | Ready | Failed | Outputs | Reply

__all__ = [
    "Abort",
    "Add",
    "Control",
    "Failed",
    "FinishReason",
    "FromCore",
    "Output",
    "Outputs",
    "Phase",
    "Ready",
    "Reply",
    "Start",
    "Timing",
    "ToCore",
    "TokenLogprobs",
]
