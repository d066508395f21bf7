"""The Hopper backend: the whole suite where such a GPU is; everywhere, what it refuses and how rows are stored."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from engine.device import detect
from engine.latent.rows import PackedRows
from engine.plugin import DeviceProfile
from engine.plugins.attention import flashmla as plugin
from engine.plugins.attention.flashmla.backend import refuse
from engine.plugins.attention.flashmla.store import store, store_packed
from engine.specs.attention import AttentionShape
from engine.testing.attention import AttentionConformance, gqa, mla

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OFFER = plugin.attention_backends()[0]
SHAPE = mla(16, dtype="bfloat16")


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
class TestFlashMLA(AttentionConformance):
    offer = OFFER
    module = "engine.plugins.attention.flashmla"
    device = detect("cuda" if HOPPER else "cpu")


@pytest.mark.parametrize(
    "changes", [{"scale": 2.0}, {"scale": 1.0, "softcap": 3.0}, {"packed": True}, {"windows": (None, 3)}], ids=str
)
def test_the_suite_shapes_latent_rows_as_it_is_asked(changes: dict[str, object]) -> None:
    shape = TestFlashMLA().shape(**changes)
    assert {name: getattr(shape, name) for name in changes} == changes
    assert (shape.head_dim, shape.v_head_dim, shape.dtype) == (576, 512, "bfloat16")


@pytest.mark.parametrize(
    ("shape", "page_size", "said"),
    [
        (gqa(dtype="bfloat16"), 64, "not gqa"),
        (replace(SHAPE, head_dim=320, v_head_dim=256), 64, "rows of 576 with a latent of 512, not 320"),
        (SHAPE, 16, "pages of 64 tokens, not 16"),
        (replace(SHAPE, dtype="float32"), 64, "computes in bfloat16, not float32"),
        (replace(SHAPE, windows=(None, 128)), 64, "no sliding windows"),
        (replace(SHAPE, softcap=30.0), 64, "no soft caps"),
    ],
)
def test_refuses_in_a_sentence(shape: AttentionShape, page_size: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        refuse(shape, page_size)


def test_only_hopper_is_offered() -> None:
    blackwell = replace(detect("cpu"), kind="cuda", compute_capability=(10, 0), here=False)
    assert isinstance(blackwell, DeviceProfile)
    assert "Hopper" in str(OFFER.available(blackwell))
    assert OFFER.available(replace(blackwell, compute_capability=(9, 0))) is None


@pytest.mark.parametrize("packed", [False, True])
def test_rows_are_stored_as_the_format_says(packed: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(6, 2, 576, generator=generator).bfloat16().to(DEVICE)[:, 0]  # strided; the last is padding
    rows[1, :128] = 0
    rows[2] *= 1e-6
    rows[3] *= 1e3
    form = PackedRows(replace(SHAPE, packed=True))
    rows[:, :512] = form.unpack(form.pack(rows))[:, :512]  # the interpreter doesn't round to 8 bits as a GPU does
    slots = torch.tensor([130, 3, 64, 0, 191, -1], device=DEVICE)
    if packed:
        guarded = torch.zeros(4, 64, 1, 656, dtype=torch.uint8, device=DEVICE)
        flat = guarded[1:].view(-1)
        places = [flat.view(dtype) for dtype in (torch.float8_e4m3fn, torch.float32, torch.bfloat16)]
        store_packed[(6,)](rows, rows.stride(0), slots, *places, PDL=False)
        wanted = form.pack(rows)
    else:
        guarded = torch.zeros(4, 64, 1, 576, dtype=torch.bfloat16, device=DEVICE)
        store[(6,)](rows, rows.stride(0), slots, guarded[1:], PDL=False)
        wanted = rows
    flat = guarded.flatten(0, 2)
    assert torch.equal(flat[slots[:5] + 64], wanted[:5])
    rest = torch.ones(256, dtype=torch.bool, device=DEVICE)
    rest[slots[:5] + 64] = False
    assert not flat[rest].any()
