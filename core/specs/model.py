"""Extension point: model implementations.

An offer says which architectures it implements and reads a profile off a `config.json` without touching a weight. What
it builds is called by the runner once a step.

Threads: `profile` of the offer runs while composing, in any process. `build`, `forward` and `logits` run on the
runner's thread; a step is one `forward`, which calls `Forward.attend` once for each layer in order, then at most one
`logits`.

Errors: `profile` raises ValueError naming the field of the config; `build` raises ValueError or KeyError naming the
tensor. What `forward` raises fails the requests of that step.

`build(options, *, config: dict, profile: ModelProfile, weights: WeightSource, linears: Quantization, ops: Ops,
device: torch.device, dtype: torch.dtype) -> Model`
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from engine.hooks import hookspec
from engine.plugin import KVKind, Offer

if TYPE_CHECKING:
    from torch import Tensor

    from engine.latent.up import LatentUp
    from engine.specs.attention import Rotation
    from engine.specs.quantization import Quantization
    from engine.specs.weight_loader import WeightSource

API: Final = 1
HOOK: Final = "models"

ANY_ARCHITECTURE: Final = "*"
"""In `ModelOffer.architectures`: takes whatever no other offer names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    """What the rest of the engine may know of a model, read from its `config.json` alone."""

    architecture: str
    layers: int
    hidden_size: int
    vocab_size: int
    max_context: int  # tokens
    kv_kind: KVKind
    heads: int
    kv_heads: int
    head_dim: int  # width of a query and key head; for `mla` of the latent row
    v_head_dim: int
    scale: float
    windows: tuple[int | None, ...]  # per layer, tokens seen
    softcap: float | None
    dtype: str  # the checkpoint's
    eos_token_ids: tuple[int, ...]
    parameters: int  # number of weights, embeddings included
    expanded: tuple[int, int] | None = None  # mla: widths of a head's key and value when rows are expanded

    @property
    def kv_elements_per_token(self) -> int:
        """Elements kept for one token over all layers."""
        row = self.head_dim if self.kv_kind is KVKind.MLA else self.head_dim + self.v_head_dim
        return self.layers * self.kv_heads * row


class Forward(ABC):
    """What a model may call while it runs a step. Made by the runner."""

    @abstractmethod
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor | None) -> Tensor:
        """Store KV and attend, as `AttentionBackend.forward` documents; returns [T, heads, v_head_dim]."""

    def attend_rotated(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation) -> Tensor:
        """The same from q and k that are still to be rotated; they may be overwritten."""
        rotation.turn(q, k)
        return self.attend(layer, q, k, v)

    def attend_latent(self, layer: int, q: Tensor, rows: Tensor, up: LatentUp) -> Tensor:
        """The same for `mla`, from plain queries; see `AttentionBackend.forward_latent`."""
        return up.mixed(self.attend(layer, up.absorb(q), rows[:, None], None))

    def keep(self, rows: Tensor) -> Tensor:
        """Those of the rows [T, …] whose final states somebody wants: [N, …], all of them unless the step says less.

        A model may drop the others once the last layer has stored their KV: it passes everything that it carries on
        through here, and then returns N states. A prompt needs one of its tokens' states, not all.
        """
        return rows

    def tap(self, layer: int, hidden: Tensor) -> None:  # noqa: B027
        """Show the hidden state [T, hidden] that enters `layer` (residual included); ignored unless somebody asked."""


class NextModule(ABC):
    """A layer behind a model's last one that looks one token further ahead (multi-token prediction).

    It keeps KV of its own, of the model's kind and sizes: one layer.
    """

    @abstractmethod
    def __call__(self, hidden: Tensor, embedded: Tensor, positions: Tensor, step: Forward, layer: int = 0) -> Tensor:
        """The state whose `Model.logits` tell the token after the embedded one; it may take `hidden`'s place next.

        Args:
            hidden: [T, hidden], the model's states after its final norm at `positions`.
            embedded: [T, hidden], the embeddings of the tokens that follow them, at `positions + 1`.
            positions: int64 [T].
            step: attention of the module's own layer, by the number `layer`.

        Returns:
            [T, hidden].
        """

    @abstractmethod
    def weight_bytes(self) -> int:
        """Bytes that the weights take in memory."""


class Model(ABC):
    """A decoder that keeps its KV through `Forward.attend`. It runs under `torch.inference_mode`."""

    profile: ModelProfile

    @abstractmethod
    def forward(self, tokens: Tensor, positions: Tensor, step: Forward) -> Tensor:
        """Ragged tokens int64 [T] at positions int64 [T] -> hidden states [T, hidden] after the final norm.

        Or [N, hidden], of the rows that `Forward.keep` has left.
        """

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> float32 [N, vocab]; may be a view into a buffer that the next call overwrites."""

    def scores(self, hidden: Tensor) -> Tensor:
        """As `logits`, but in the dtype that the output layer has made; for whoever converts as it reads."""
        return self.logits(hidden)

    def embed(self, tokens: Tensor) -> Tensor:
        """Rows of the input embedding: int64 [...] -> [..., hidden], before whatever the model does to them.

        Whoever claims `hidden_states` tells them; it is asked by speculators, not on plain steps.

        Raises:
            ValueError: this implementation doesn't tell.
        """
        raise ValueError(f"the model {type(self).__name__} does not show its embedding, which the speculator needs")

    def next_modules(self, weights: WeightSource, linears: Quantization) -> Sequence[NextModule]:
        """Read the modules that predict further tokens, the first for the token after the next; none by default.

        `weights` is the checkpoint of the model, opened once more. On the runner's thread.

        Raises:
            ValueError: a weight of theirs is missing or of another shape than the config says.
        """
        return ()

    @abstractmethod
    def weight_bytes(self) -> int:
        """Bytes that the weights take in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOffer(Offer[Model]):
    """An offer that also knows which checkpoints it can read.

    `profile` raises ValueError, naming the field, when the config asks for what the implementation lacks. `weights`
    lists name (in the Hugging Face spelling) and shape of every weight that will be read, so that a plan can count
    bytes and ranks; without it the plan knows the profile's sum only. Neither may import torch.
    """

    architectures: frozenset[str]
    profile: Callable[[Mapping[str, Any]], ModelProfile]
    weights: Callable[[Mapping[str, Any]], Mapping[str, tuple[int, ...]]] | None = None


OFFER: Final = ModelOffer


BUILDS: Final = Model


@hookspec
def models() -> Iterable[ModelOffer]:  # type: ignore[empty-body]
    """Offer model implementations. Must not import torch."""


__all__ = [
    "ANY_ARCHITECTURE",
    "API",
    "HOOK",
    "OFFER",
    "Forward",
    "Model",
    "ModelOffer",
    "ModelProfile",
    "NextModule",
    "models",
]
