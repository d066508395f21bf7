"""Models inside installed Python packages. The package is only looked up, never imported."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from engine.checkpoint import served_name
from engine.specs.model_source import ModelFiles, ModelSource, Progress


class PackageSource(ModelSource):
    """NAME is a distribution or its import name; FILE a path within its folders, needed if it holds several models."""

    def resolve(self, rest: str, progress: Progress) -> ModelFiles:
        name, _, inside = rest.partition("/")
        models = _models(name)
        if inside:
            models = [path for path in models if path.as_posix().endswith("/" + inside)]
        if len(models) == 1:
            return ModelFiles(path=models[0], name=served_name(models[0]))
        if inside:
            raise FileNotFoundError(f"package {name} holds no model {inside!r}")
        if not models:
            raise FileNotFoundError(f"package {name} is installed but holds no model (a GGUF file or a config.json)")
        found = ", ".join(path.name for path in models)
        raise FileNotFoundError(f"package {name} holds several models ({found}); say package:{name}/FILE")


def _models(name: str) -> list[Path]:
    """GGUF files and model folders among the files that a distribution installed."""
    distribution = _distribution(name)
    files = [Path(str(distribution.locate_file(file))) for file in distribution.files or []]
    found = [path for path in files if path.suffix.lower() == ".gguf"]
    found += [path.parent for path in files if path.name == "config.json"]
    return sorted(path.resolve() for path in found if path.exists())


def _distribution(name: str) -> metadata.Distribution:
    try:
        return metadata.distribution(name)
    except (metadata.PackageNotFoundError, ValueError):
        owners = metadata.packages_distributions().get(name)
    if not owners:
        spelled = name.replace("_", "-") or "NAME"
        raise FileNotFoundError(
            f"Python package {name!r} is not installed; `pip install --no-deps {spelled}` installs it"
        )
    return metadata.distribution(owners[0])


__all__ = ["PackageSource"]
