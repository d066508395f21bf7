"""Files that are here already."""

from __future__ import annotations

from pathlib import Path

from engine.checkpoint import gguf_file, served_name
from engine.specs.model_source import ModelFiles, ModelSource, Progress


class PathSource(ModelSource):
    """Takes a GGUF file, or a folder with a model in it; `~` is the home folder."""

    def resolve(self, rest: str, progress: Progress) -> ModelFiles:
        path = Path(rest).expanduser()
        if not path.exists():
            raise FileNotFoundError(f"no file or folder {path.absolute()}; path: takes a GGUF file or a model's folder")
        path = gguf_file(path) or path
        return ModelFiles(path=path.absolute(), name=served_name(path))


__all__ = ["PathSource"]
