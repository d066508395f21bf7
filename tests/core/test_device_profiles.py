"""The table of devices, and a user's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.device_profiles import known, load_profile
from engine.errors import ConfigError
from engine.ops.kernels import missing

OWN = "kind: cuda\nname: Mine\nmemory: 8GiB\ncompute_capability: [8, 6]\nbandwidth: 5e11\nflops: {float16: 4e13}\n"


def test_a_known_device_is_complete_and_not_this_machine() -> None:
    h200 = load_profile("h200")
    assert (h200.kind, h200.compute_capability, h200.here) == ("cuda", (9, 0), False)
    assert h200.memory_bytes == 143771 * 2**20
    assert h200.bandwidth_bytes_per_s == 4.8e12
    assert h200.flops["bfloat16"] == 989e12


@pytest.mark.parametrize("name", known())
def test_every_device_of_the_table_has_what_costs_are_computed_from(name: str) -> None:
    device = load_profile(name)
    assert device.bandwidth_bytes_per_s
    assert device.flops.get("float32")
    assert (device.compute_capability is None) == (device.kind == "cpu")
    assert hash(device) == hash(load_profile(name))


def test_a_file_describes_a_device_of_the_users_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(OWN)
    mine = load_profile(path)
    assert (mine.name, mine.memory_bytes, mine.bandwidth_bytes_per_s) == ("Mine", 2**33, 5e11)
    assert mine.flops == {"float16": 4e13}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kind: tpu\nname: x\nmemory: 1GiB\n", "kind: Input should be 'cpu' or 'cuda'"),
        (OWN + "colour: red\n", "colour: Extra inputs are not permitted; its keys are kind, name"),
        (OWN.replace("4e13", "-4e13"), "flops.float16: Input should be greater than 0"),
        (OWN.replace("5e11", ".inf"), "bandwidth: Input should be a finite number"),
        (OWN.replace("float16", "fp16"), "flops.fp16.[key]: Input should be 'float32', 'bfloat16'"),
        (OWN + "name: Yours\n", "name is given twice, first in line 2"),
        ("[1, 2]\n", "is not a mapping; its keys are kind, name"),
        ("", "kind: Field required"),
        ("a: [", "not valid YAML"),
    ],
)
def test_a_malformed_file_says_what_is_wrong(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_profile(path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"no device profile is named 'h20'.*h200.*did you mean 'h200'\?"):
        load_profile("h20")


def test_the_compiled_kernels_answer_for_the_profile_and_not_for_this_machine() -> None:
    assert missing(load_profile("cpu-avx512")) is None
    assert "lacks avx512" in (missing(load_profile("cpu")) or "")
