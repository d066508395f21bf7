"""A test class for every faulty plugin of this folder, for the run that `test_kit_catches_faults.py` starts."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from engine.testing.suites import SUITES, suite_for

torch.set_num_threads(1)

HERE = ("broken_parts", "run_faults")

LESS: dict[str, dict[str, Any]] = {
    "attention_backends": {"grid": 8, "largest_batch": 2, "most": 3},
    "kv_caches": {"examples": 8},
    "kv_connectors": {"patience": 2.0},
    "executors": {"patience": 0.5},
}
"""A fault shows in a fraction of what a suite tries."""

LEFT_OUT = {
    "attention_backends": (
        "test_equals_the_oracle",
        "test_head_sizes",
        "test_page_sizes",
        "test_random_traffic",
        "test_windows_differ_by_layer",
    ),
    "kv_caches": ("test_random_traffic",),
    "kv_connectors": (
        "test_across_processes",
        "test_altered_handles_never_give_other_bytes",
        "test_calls_return_while_the_producer_is_stopped",
        "test_cancelled_fetch_writes_no_more",
        "test_close_leaves_nothing",
        "test_killed_consumer_does_not_trouble_the_producer",
        "test_killed_producer_fails_its_fetches",
        "test_pages_reused_after_withdraw_are_never_taken_for_the_old_ones",
        "test_slow_producer_is_waited_for",
    ),
    "speculators": ("test_forget_frees", "test_sampled_text_keeps_the_target_s_distribution"),
}
"""Checks that take long, run only for the faults that are meant for them."""

FOR_SOUND_MODULES = (
    "test_config_and_tokenizer_import_no_torch",
    "test_declaring_module_is_light",
    "test_profile_imports_no_torch",
)
"""The modules of this folder import what they need at the top."""


def make(name: str) -> type[Any]:
    """The test class of a faulty plugin."""
    module = import_module(name)
    hook = next(hook for hook in SUITES if hasattr(module, hook))
    others = (check for check in LEFT_OUT.get(hook, ()) if check != module.CAUGHT_BY)
    attributes = LESS.get(hook, {}) | getattr(module, "SUITE", {}) | dict.fromkeys(others)
    attributes |= dict.fromkeys(FOR_SOUND_MODULES)
    return type(f"Test_{name}", (suite_for(hook, module, "broken"),), attributes)


for path in sorted(Path(__file__).parent.glob("*.py")):
    if path.stem not in HERE:
        globals()[f"Test_{path.stem}"] = make(path.stem)
