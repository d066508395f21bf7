"""Draws its drafts from one distribution and reports another."""

import torch
from broken_parts import offer

from engine.hooks import hookimpl
from engine.plugin import Flag
from engine.specs.speculator import Draft, Speculator

CAUGHT_BY = "test_sampled_text_keeps_the_target_s_distribution"
MAY_FAIL = ("test_same_tokens_same_drafts", "test_requests_do_not_see_each_other")


class Broken(Speculator):
    def __init__(self):
        self.random = torch.Generator().manual_seed(1)

    def propose(self, contexts):
        return [self.draft(context) for context in contexts]

    def draft(self, context):
        count = min(2, context.max_tokens)
        tokens = torch.randint(1, 3, (count,), generator=self.random).tolist()
        probs = torch.zeros(count, 64)
        probs[:, 1:5] = 0.25  # the tokens 3 and 4 are never drawn
        return Draft(tokens, None, probs) if count else Draft()


@hookimpl
def speculators():
    return [offer(lambda options, *, profile, max_running: Broken(), flags=frozenset({Flag.DRAFT_PROBS}))]
