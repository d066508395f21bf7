"""The Triton backend through the suite: on the GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from engine.device import detect
from engine.plugins.attention import triton as plugin
from engine.testing.attention import AttentionConformance

GPU = torch.cuda.is_available()
DEVICE = detect("cuda" if GPU else "cpu")
DECLARED = plugin.attention_backends()[0]


DTYPES = DECLARED.capabilities.dtypes - (frozenset() if GPU else {"bfloat16"})  # the interpreter's dot() misreads it


class TestTritonAttention(AttentionConformance):
    offer = replace(
        DECLARED, capabilities=replace(DECLARED.capabilities, devices=frozenset({DEVICE.kind}), dtypes=DTYPES)
    )
    module = "engine.plugins.attention.triton"
    device = DEVICE
    grid = 208 if GPU else 16
    largest_batch = 24 if GPU else 3
    most = 6 if GPU else 2
