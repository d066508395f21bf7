"""docs/composition.md and docs/compatibility-policy.md say what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from engine import hooks
from engine.costs import TOKENS
from engine.device_profiles import known, load_profile
from engine.loading import IMPORT_SECONDS
from engine.specs import POINTS

DOCS = Path(__file__).parents[1] / "docs"


def words(page: str) -> str:
    """A page in one line."""
    return " ".join((DOCS / page).read_text().split())


def test_the_known_devices_are_listed() -> None:
    *others, last = known()
    assert f"{', '.join(others)} and {last}." in words("composition.md")


def test_the_example_of_a_device_is_one(tmp_path: Path) -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", (DOCS / "composition.md").read_text(), re.DOTALL)
    path = tmp_path / "mine.yaml"
    path.write_text(example)
    device = load_profile(path)
    assert (device.bandwidth_bytes_per_s, device.flops["bfloat16"]) == (768e9, 155e12)


def test_numbers_are_those_of_the_code() -> None:
    assert f"{TOKENS:,} tokens" in words("composition.md")
    assert f"takes more than {IMPORT_SECONDS:.0f} seconds" in words("plugins.md")
    assert f"hook API, now `v{hooks.HOOK_API}`" in words("compatibility-policy.md")


def test_no_older_number_is_accepted_without_the_policy_saying_so() -> None:
    assert "there is none before it" in words("compatibility-policy.md")
    assert hooks.HOOK_API == 1
    assert not hooks.ENDING
    assert {point.API for point in POINTS} == {1}
