"""Compiled kernels between starts: the key, what is found under it, and why nothing is."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.cuda.kernel_cache import FACTS, key_of, open_cache

HERE = {"triton": "3.6.0", "device": "NVIDIA H200"}


def compiled(folder: Path) -> None:
    (folder / "abc").mkdir()
    (folder / "abc" / "decode.cubin").write_bytes(b"x")


def test_the_second_start_finds_what_the_first_left(tmp_path: Path) -> None:
    first = open_cache(tmp_path, HERE)
    assert first.miss == f"{tmp_path} holds no kernels yet"
    assert first.told().startswith(f"compiled kernels: none for key {key_of(HERE)}, since ")
    compiled(first.folder)
    second = open_cache(tmp_path, HERE)
    assert (second.folder, second.kernels, second.miss) == (first.folder, 1, None)
    assert second.told() == f"compiled kernels: key {key_of(HERE)}, 1 in {first.folder}"


def test_a_miss_tells_what_differs_from_the_nearest(tmp_path: Path) -> None:
    for facts in ({"triton": "3.5.1", "device": "NVIDIA H200"}, {"triton": "3.4.0", "device": "NVIDIA A100"}):
        compiled(open_cache(tmp_path, facts).folder)
    assert open_cache(tmp_path, HERE).miss == "triton is 3.6.0, not 3.5.1"


def test_deleted_kernels_and_unreadable_facts(tmp_path: Path) -> None:
    folder = open_cache(tmp_path, {"triton": "3.5.1"}).folder
    (folder / FACTS).write_text("no json")
    assert open_cache(tmp_path, {"triton": "3.6.0"}).miss == "triton is 3.6.0, not None"
    (folder / FACTS).unlink()
    assert open_cache(tmp_path, {"triton": "3.6.0"}).miss == f"{tmp_path} holds no kernels yet"


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        open_cache(tmp_path / "file", HERE)
