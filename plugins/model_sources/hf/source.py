"""Repositories of the Hugging Face hub. The local cache is asked first, so a model that is there needs no network."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, Final

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from tqdm.auto import tqdm  # type: ignore[import-untyped]

from engine.checkpoint import gguf_file, read_json
from engine.specs.model_source import ModelFiles, ModelSource, Progress

_WANTED: Final = ["*.json", "*.safetensors", "tokenizer*", "*.jinja", "*.gguf"]
_INDEX: Final = "model.safetensors.index.json"


class HubSource(ModelSource):
    """Fetches configuration, tokenizer and weights; never pickles, never code."""

    def resolve(self, rest: str, progress: Progress) -> ModelFiles:
        repository, _, revision = rest.partition("@")
        folder = _cached(repository, revision or None) or _fetched(repository, revision or None, progress)
        return ModelFiles(path=gguf_file(folder) or folder, name=repository.rpartition("/")[2].lower())


def _cached(repository: str, revision: str | None) -> Path | None:
    try:
        folder = Path(snapshot_download(repository, revision=revision, allow_patterns=_WANTED, local_files_only=True))
    except HFValidationError as error:
        raise FileNotFoundError(f"{repository!r} is no repository name (say hf:ORG/NAME): {error}") from None
    except (LocalEntryNotFoundError, HfHubHTTPError):
        return None
    return folder if _complete(folder) else None


def _complete(folder: Path) -> bool:
    """Whether weights are there; a cache may hold what another program wanted of the repository, or half of it."""
    if (folder / _INDEX).is_file():
        return all((folder / name).is_file() for name in set(read_json(folder / _INDEX).get("weight_map", {}).values()))
    return any(folder.glob("*.safetensors")) or any(folder.glob("*.gguf"))


def _fetched(repository: str, revision: str | None, progress: Progress) -> Path:
    progress(0.0, f"fetching {repository}")
    try:
        path = snapshot_download(
            repository, revision=revision, allow_patterns=_WANTED, tqdm_class=_bar(repository, progress)
        )
    except (HfHubHTTPError, OSError) as error:
        at = f" at revision {revision}" if revision else ""
        reason = str(error).splitlines()[0]
        raise FileNotFoundError(
            f"can't fetch {repository}{at} from the Hugging Face hub, and it is not in the local cache: {reason}"
        ) from error
    progress(1.0, f"fetched {repository}")
    return Path(path)


def _bar(repository: str, progress: Progress) -> type[Any]:
    """A progress bar that reports instead of drawing. The client makes several; that of the bytes counts."""

    class Reporting(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs | {"file": io.StringIO(), "disable": False})

        def update(self, n: float | None = 1) -> bool | None:
            shown: bool | None = super().update(n)
            if self.unit == "B" and self.total:
                progress(min(self.n / self.total, 1.0), f"fetching {repository}")
            return shown

    return Reporting


__all__ = ["HubSource"]
