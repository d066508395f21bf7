"""Conformance of weight loaders: what was written is what is read, and a damaged file is an error that names it.

The sample is a tiny Hugging Face folder. A loader of another format overrides `sample`:

    @pytest.fixture
    def sample(self, tmp_path):
        ...  # write a checkpoint in the format
        return Sample(path, tensors)
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.specs.weight_loader import WeightLoader, WeightSource
from engine.testing.checkpoints import read_tensors
from engine.testing.offer import OfferConformance

SAMPLE = "LlamaForCausalLM"


@dataclass(frozen=True, slots=True)
class Sample:
    """A checkpoint, and the tensors that lie in it under their Hugging Face names."""

    path: Path
    tensors: Mapping[str, Tensor]
    tolerance: float = 0.0  # of formats that round


class WeightLoaderConformance(OfferConformance):
    """Subclasses set `offer` and `module`, and override `sample` for formats other than Hugging Face folders."""

    @pytest.fixture
    def sample(self, tmp_path: Path, tiny_checkpoint: Callable[[str], Path]) -> Sample:
        """A folder that transformers wrote."""
        folder = shutil.copytree(tiny_checkpoint(SAMPLE), tmp_path / "sample")
        return Sample(folder, read_tensors(folder))

    @pytest.fixture
    def loader(self, sample: Sample) -> WeightLoader:
        """The loader; skips the test if the sample is of another format."""
        loader = self.loader_alone()
        if not loader.recognizes(sample.path):
            pytest.skip(f"{self.offer.name} doesn't read Hugging Face folders; override `sample` in a test class")
        return loader

    @pytest.fixture
    def source(self, loader: WeightLoader, sample: Sample) -> WeightSource:
        """The open sample. A loader that makes weights up has none of its own to compare."""
        source = loader.open(sample.path, loader.config(sample.path))
        if not set(source.names()):
            pytest.skip(f"{self.offer.name} makes its weights up")
        return source

    def loader_alone(self) -> WeightLoader:
        """A loader with the options of the suite."""
        loader = self.offer.build(self.options())
        assert isinstance(loader, WeightLoader)
        return loader

    def test_every_tensor_is_what_was_written(self, source: WeightSource, sample: Sample) -> None:
        """Name by name, in values and in shape."""
        assert set(source.names()) >= set(sample.tensors)
        for name, want in sample.tensors.items():
            got = source.get(name, torch.float32)
            assert source.shape(name) == tuple(got.shape) == tuple(want.shape), name
            torch.testing.assert_close(got, want.float(), rtol=0, atol=sample.tolerance, msg=f"{name} differs")

    def test_slices_are_rows_of_the_whole(self, source: WeightSource, sample: Sample) -> None:
        """Ranks read only their share."""
        for name in sample.tensors:
            whole = source.get(name, torch.float32)
            cut = slice(len(whole) // 3, 2 * len(whole) // 3)
            assert torch.equal(source.get(name, torch.float32, cut), whole[cut]), name

    def test_tensors_come_dense_and_in_the_dtype_asked_for(self, source: WeightSource, sample: Sample) -> None:
        """On the CPU, whatever the file holds."""
        for name in sample.tensors:
            for dtype in (torch.float32, torch.bfloat16):
                got = source.get(name, dtype)
                assert (got.dtype, got.device.type, got.is_contiguous()) == (dtype, "cpu", True)

    def test_blocks_hold_the_weights(self, source: WeightSource, sample: Sample) -> None:
        """Who hands out a matrix in blocks keeps the promise of their layout."""
        for name in sample.tensors:
            if (blocks := source.blocks(name)) is None:
                continue
            codes = blocks.codes
            if blocks.bits == 4:
                codes = torch.cat((codes & 15, codes >> 4), dim=-1)
            assert codes.dtype is (torch.uint8 if blocks.bits == 4 else torch.int8)
            found = codes.float() * blocks.scale.float().unsqueeze(-1)
            if blocks.offset is not None:
                found += blocks.offset.float().unsqueeze(-1)
            want = source.get(name, torch.float32)
            torch.testing.assert_close(found.flatten(1), want, rtol=1e-3, atol=1e-3 * want.abs().max().item())

    def test_tensors_outlive_the_source(self, source: WeightSource, sample: Sample) -> None:
        """`close` takes the files, not what was handed out."""
        name = next(iter(sample.tensors))
        got = source.get(name, torch.float32)
        kept = got.clone()
        source.close()
        assert torch.equal(got, kept)

    def test_an_absent_tensor_is_named(self, source: WeightSource) -> None:
        """Together with the file."""
        for ask in (source.shape, lambda name: source.get(name, torch.float32)):
            with pytest.raises((KeyError, ValueError), match=r"no\.such\.tensor"):
                ask("no.such.tensor")
        assert source.origin("no.such.tensor")

    def test_what_is_expected_is_compared(self, source: WeightSource, sample: Sample) -> None:
        """A tensor of another shape is refused before anything is read."""
        shapes = {name: tuple(tensor.shape) for name, tensor in sample.tensors.items()}
        source.expect(shapes)
        name = next(iter(shapes))
        with pytest.raises(ValueError, match=name):
            source.expect({**shapes, name: (3, 5)})
        with pytest.raises(ValueError, match=r"no\.such\.tensor"):
            source.expect({"no.such.tensor": (1,)})

    def test_the_digest_names_the_weights(self, loader: WeightLoader, sample: Sample) -> None:
        """The same each time the checkpoint is opened, and short enough for a handle."""
        config = loader.config(sample.path)
        first, second = (loader.open(sample.path, config).digest() for _ in range(2))
        assert first == second
        assert 0 < len(first) <= 128

    def test_config_and_tokenizer_import_no_torch(self, loader: WeightLoader, sample: Sample) -> None:
        """The server reads both, and it must start at once."""
        code = (
            f"import sys, pathlib, {self.module} as module\n"
            f"offer = next(o for o in module.weight_loaders() if o.name == {self.offer.name!r})\n"
            f"offer.build(offer.options()).config(pathlib.Path({str(sample.path)!r}))\n"
            "print('torch' in sys.modules)"
        )
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert found.stdout.strip() == "False"

    @pytest.mark.parametrize("what", ["an empty folder", "a file of text", "nothing"])
    def test_what_is_no_checkpoint_is_not_recognized(self, tmp_path: Path, what: str) -> None:
        """By names and first bytes alone; none of it raises."""
        path = tmp_path / "thing"
        if what == "an empty folder":
            path.mkdir()
        elif what == "a file of text":
            path.write_text("not a checkpoint\n")
        assert self.loader_alone().recognizes(path) is False

    def test_damaged_files_are_refused_by_name(self, loader: WeightLoader, sample: Sample) -> None:
        """Each file cut to a half, a few bytes, or nothing: ValueError with its name, or right values all the same."""
        files = [sample.path] if sample.path.is_file() else sorted(p for p in sample.path.iterdir() if p.is_file())
        for file in files:
            whole = file.read_bytes()
            for keep in (len(whole) // 2, 7, 0):
                file.write_bytes(whole[:keep])
                said = complaint(loader, sample)
                assert said is None or file.name in said or sample.path.name in said, said
            file.write_bytes(whole)


def complaint(loader: WeightLoader, sample: Sample) -> str | None:
    """Read every tensor and compare those that are there; what the ValueError said, if one was raised."""
    try:
        source = loader.open(sample.path, loader.config(sample.path))
        for name in source.names():
            got = source.get(name, torch.float32)
            torch.testing.assert_close(got, sample.tensors[name].float(), rtol=0, atol=sample.tolerance)
        source.close()
    except ValueError as error:
        return str(error)
    return None


__all__ = ["Sample", "WeightLoaderConformance"]
