"""Conformance of model sources: files that exist, or a sentence that says what was looked for.

Nothing here needs a network: reaching for one fails at once, as on a machine without it. A subclass that knows a model
its source can find names it in `known`.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any, ClassVar

import pytest

from engine.specs.model_source import ModelFiles, ModelSource
from engine.testing.offer import OfferConformance

NOWHERE = ("no-such-model-7f3a", "no-such-org/no-such-model-7f3a")


class ModelSourceConformance(OfferConformance):
    """Subclasses set `offer` and `module`; `known` if they have a model to find."""

    known: ClassVar[str | None] = None
    """The rest of a reference, after the scheme, that leads to a model on this machine."""

    @pytest.fixture(autouse=True)
    def _no_network(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*args: Any, **kwargs: Any) -> None:
            raise OSError("this machine has no network")

        monkeypatch.setattr(socket, "getaddrinfo", refuse)
        monkeypatch.setattr(socket.socket, "connect", refuse)

    def source(self) -> ModelSource:
        """A source with the options of the suite."""
        source = self.offer.build(self.options())
        assert isinstance(source, ModelSource)
        return source

    def check(self, files: ModelFiles) -> None:
        """What a resolved model must look like."""
        assert files.path.exists()
        assert files.path.is_absolute(), f"{files.path} depends on the folder the engine runs in"
        assert files.name
        assert files.name == files.name.strip()

    def test_the_name_is_a_scheme(self) -> None:
        """It stands before the colon in the YAML."""
        assert self.offer.name.replace("-", "").replace("_", "").isalnum()

    @pytest.mark.parametrize("rest", NOWHERE)
    def test_what_is_nowhere_is_named(self, rest: str) -> None:
        """FileNotFoundError with a sentence, without a network too; none of OSError's bare codes."""
        with pytest.raises(FileNotFoundError) as raised:
            self.source().resolve(rest, lambda share, words: None)
        said = str(raised.value)
        assert any(part in said for part in rest.split("/")), said
        assert len(said.split()) > 3, f"no sentence: {said!r}"

    def test_a_folder_or_file_is_left_as_it_is(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Looking for what is not there creates nothing in the working folder."""
        monkeypatch.chdir(tmp_path)
        with pytest.raises(FileNotFoundError):
            self.source().resolve(NOWHERE[0], lambda share, words: None)
        assert list(tmp_path.iterdir()) == []

    def test_a_known_model_is_found(self) -> None:
        """Twice the same; progress is a share and a few words."""
        if self.known is None:
            pytest.skip(f"no model that {self.offer.name} could find is known; set `known` in a test class")
        told: list[tuple[float, str]] = []
        found = [self.source().resolve(self.known, lambda share, words: told.append((share, words))) for _ in range(2)]
        assert found[0] == found[1]
        self.check(found[0])
        assert all(0.0 <= share <= 1.0 and words for share, words in told)


__all__ = ["ModelSourceConformance"]
