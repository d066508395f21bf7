"""The backend is held to everything that it claims."""

import engine_flex_attention

from engine.testing.attention import AttentionConformance


class TestFlex(AttentionConformance):
    (offer,) = engine_flex_attention.attention_backends()
    module = "engine_flex_attention"
    grid = 48  # every fourth of the kit's shapes: this backend takes long for each
