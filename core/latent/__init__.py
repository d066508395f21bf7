"""Attention over latent rows (KV kind `mla`): what all backends share.

A token keeps one row for all heads: a latent, from which each head's key and value can be made, and a rotary part.
Queries meet rows either *absorbed*, multiplied by their head's key matrix, so that rows are keys as they are; or
*expanded*, where rows are turned into every head's keys and values first. Few queries are cheaper absorbed, many
expanded; both give the same sums. `divide` says which requests of a step go which way, `LatentBackend` runs both.
"""
