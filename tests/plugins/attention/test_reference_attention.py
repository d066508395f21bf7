"""The reference attention backend against the dense oracle."""

from __future__ import annotations

import pytest
import torch

from engine.plugins.attention import reference
from engine.testing.attention import AttentionConformance, gqa, mla


class TestReference(AttentionConformance):
    (offer,) = reference.attention_backends()
    module = "engine.plugins.attention.reference"

    def test_values_narrower_than_keys(self) -> None:
        self.play(self.bench(gqa(4, 2, 24, v_head_dim=16)), [{"a": 20}, {"a": 1, "b": 9}])

    @pytest.mark.parametrize("shape", [gqa(windows=(None, 9)), mla(2, 96, 64)], ids=["gqa", "mla"])
    def test_trees_for_every_kind(self, shape) -> None:
        sees = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
        self.play(self.bench(shape), [{"a": 21}, {"a": 3}], {"a": sees})

    def test_heads_that_cannot_be_grouped_are_refused_at_build(self) -> None:
        with pytest.raises(ValueError, match="5 query heads can't be shared out among 2 KV heads"):
            self.bench(gqa(5, 2))

    def test_layout_names_the_parts(self) -> None:
        assert self.bench(gqa(4, 2, 64), 8).backend.kv_layout().parts == (("k", (8, 2, 64)), ("v", (8, 2, 64)))
        assert self.bench(mla(), 8).backend.kv_layout().parts == (("latent", (8, 1, 576)),)
