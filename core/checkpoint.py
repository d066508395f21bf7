"""Folders in the Hugging Face layout: their JSON files, and the name under which a model is offered to clients.

Shared by the loaders, the sources and the tokenizer; reads no weight and imports no torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

_PACKING: Final = re.compile(r"[.-](I?Q\d\w*|F16|BF16|F32|FP16|FP8)$", re.IGNORECASE)


def read_json(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds.

    Raises:
        ValueError: the file is missing or holds something else; the sentence names it.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path.parent} has no {path.name}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def folder_config(folder: Path) -> dict[str, Any]:
    """`config.json`, with two things that stand elsewhere: the folder itself (`_name_or_path`), and the end-of-sequence
    tokens of `generation_config.json`, which are the ones the model's authors stop at. Raises as `read_json` does."""
    config = read_json(folder / "config.json") | {"_name_or_path": str(folder)}
    if (folder / "generation_config.json").is_file():
        stops = read_json(folder / "generation_config.json").get("eos_token_id")
        config |= {"eos_token_id": stops} if stops is not None else {}
    return config


def count(config: Mapping[str, Any], field: str, default: int | None = None) -> int:
    """The number of things that a config's field states; the default where it is absent or null.

    Raises:
        ValueError: the field is missing and has no default, or is no positive integer; the sentence names it.
    """
    value = default if config.get(field) is None else config[field]
    if value is None:
        raise ValueError(f"{field} is missing")
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"{field} must be a positive integer, not {value!r}")
    return value


def gguf_file(path: Path) -> Path | None:
    """The GGUF file that `path` is or, for a folder without a `config.json`, the only one that lies in it."""
    if path.is_file():
        return path if path.suffix.lower() == ".gguf" else None
    if (path / "config.json").exists():
        return None
    found = sorted(path.glob("*.gguf"))
    return found[0] if len(found) == 1 else None


def served_name(path: Path) -> str:
    """What clients may call the model at `path`: the name of file or folder in lower case, without the packing."""
    name = path.stem if path.suffix.lower() == ".gguf" else path.resolve().name
    return _PACKING.sub("", name).lower()


__all__ = ["count", "folder_config", "gguf_file", "read_json", "served_name"]
