"""Finds the files of a Hugging Face folder. Never unpickles: folders with pickled weights only are refused."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from engine.checkpoint import folder_config, read_json
from engine.specs.weight_loader import WeightLoader, WeightSource

if TYPE_CHECKING:
    from engine.tokenizer import Tokenizer

_INDEX: Final = "model.safetensors.index.json"
_SINGLE: Final = "model.safetensors"
_PICKLED: Final = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class SafetensorsLoader(WeightLoader):
    """One folder with `config.json`, `tokenizer.json` and one or more safetensors files."""

    def recognizes(self, path: Path) -> bool:
        return (path / "config.json").is_file()

    def config(self, path: Path) -> dict[str, Any]:
        weight_files(path)
        return folder_config(path)

    def tokenizer(self, path: Path) -> Tokenizer:
        from engine.tokenizer import Tokenizer

        return Tokenizer.from_folder(path)

    def open(self, path: Path, config: dict[str, Any]) -> WeightSource:
        from engine.plugins.weight_loaders.safetensors.weights import SafetensorsWeights

        return SafetensorsWeights(weight_files(path))


def weight_files(folder: Path) -> list[Path]:
    """The folder's safetensors files, in the order of their names.

    Raises:
        ValueError: there are none, or one that the index names is missing.
    """
    if (folder / _INDEX).is_file():
        table = read_json(folder / _INDEX).get("weight_map")
        if not isinstance(table, dict) or not table:
            raise ValueError(f"{folder / _INDEX} has no weight_map")
        names = sorted({str(name) for name in table.values()})
        if outside := [name for name in names if name != Path(name).name]:
            raise ValueError(f"{folder / _INDEX} names {outside[0]!r}, which is not a file of this folder")
        files = [folder / name for name in names]
        for file in files:
            if not file.is_file():
                raise ValueError(f"{folder} lacks {file.name}, which {_INDEX} names; fetch the checkpoint again")
        return files
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    if files := sorted(folder.glob("*.safetensors")):
        return files
    if pickled := sorted(file.name for pattern in _PICKLED for file in folder.glob(pattern)):
        raise ValueError(
            f"{folder} holds pickled weights only ({pickled[0]}), which could run code and are not read; convert them "
            f"to safetensors (save_pretrained of transformers writes those)"
        )
    raise ValueError(f"{folder} holds no weights (*.safetensors); for random ones say model.loader: dummy")


__all__ = ["SafetensorsLoader", "weight_files"]
