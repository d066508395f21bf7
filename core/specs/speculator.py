"""Extension point: speculators, which guess tokens that the target model then verifies.

The core verifies, rolls back and counts; a speculator only proposes. There are two kinds, offered by the same hook. A
`Speculator` sees tokens alone: `propose` runs once a step on the scheduler's thread, so an engine with one does not
schedule ahead. A `ResidentSpeculator` is a model that lives beside the target on the runner's thread: it may see the
target's hidden states, share its embedding and output layer, and keep KV in pages that the core allocates.

Threads: all calls of a `Speculator` come from the scheduler's thread, one at a time: `taps` once, then in each step
`propose`, and after the step `accepted` for each request that had a draft; `forget` when a request leaves. Of a
`ResidentSpeculator`, `plan` runs once while the engine is assembled; then, all on the runner's thread, `load` once, and
in each step `draft` before the target's forward pass and `extend` after the verification, under
`torch.inference_mode`. Either is left out of a step that has no use for it.

Errors: what `propose`, `draft` or `extend` raises is counted and logged, and the step runs without drafts; so do
malformed drafts. `plan` raises ValueError for a target that it can't serve, and `load` also KeyError and OSError;
start-up then ends with that sentence. The other methods must not raise.

`build(options, *, profile: ModelProfile, max_running: int) -> Speculator | ResidentSpeculator`; it reads no weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from engine.hooks import hookspec
from engine.plugin import DeviceProfile, Offer

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from engine.ops import Ops
    from engine.sampling_params import SamplingParams
    from engine.specs.attention import AttentionShape
    from engine.specs.model import Forward, Model, ModelProfile, NextModule
    from engine.specs.quantization import Quantization
    from engine.specs.weight_loader import WeightSource
    from engine.tokenizer import Tokenizer

API: Final = 1
HOOK: Final = "speculators"


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetTaps:
    """What a speculator wants to see of the target's forward pass.

    `hidden_layers` are layer indices; the state that *enters* that layer is tapped, and index `layers` means the state
    before the final norm.
    """

    hidden_layers: tuple[int, ...] = ()
    final_hidden: bool = False  # the state after the final norm


@dataclass(frozen=True, slots=True)
class DraftContext:
    """One request that may be drafted for. `hidden` is present when taps were asked for."""

    request_id: str
    tokens: Sequence[int]  # prompt and output so far; read only
    prompt_len: int
    max_tokens: int  # at most this many draft tokens may be proposed
    hidden: Tensor | None = None  # [new tokens, taps, hidden size]


@dataclass(frozen=True, slots=True)
class Draft:
    """A chain or tree of draft tokens.

    `parents[i]` is the index of the draft token that i follows, or None when i follows the last real token; without
    `parents` the draft is a chain. `probs` is the distribution each token was sampled from, float32 [n, vocab]; without
    it the draft counts as a point mass. Parents come before their children, siblings are distinct.
    """

    tokens: Sequence[int] = ()
    parents: Sequence[int | None] | None = None
    probs: Tensor | None = None


class Speculator(ABC):
    """Proposes draft tokens. Wrong, empty or invalid drafts cost time, never correctness."""

    def taps(self) -> TargetTaps:
        """What `DraftContext.hidden` must hold; nothing by default."""
        return TargetTaps()

    @abstractmethod
    def propose(self, contexts: Sequence[DraftContext]) -> Sequence[Draft]:
        """One draft per context, in order; an empty draft is a plain step."""

    def accepted(self, request_id: str, drafted: int, accepted: int) -> None:  # noqa: B027
        """Learn how many draft tokens of the last proposal were kept."""

    def forget(self, request_id: str) -> None:  # noqa: B027
        """The request is gone (finished, aborted or preempted): drop what is kept for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherModel:
    """A model beside the target, composed by the same rules. `load` belongs on the runner's thread."""

    profile: ModelProfile
    config: Mapping[str, Any]  # its config.json
    tokenizer: Callable[[], Tokenizer]
    load: Callable[[int], Model]
    """Reads the weights, for positions below the argument; raises as a model's `build` does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The target before its weights are read, and the engine around it."""

    profile: ModelProfile
    config: Mapping[str, Any]  # the target's config.json
    path: Path  # folder or file of the target
    dtype: str  # of weights, activations and KV
    device: DeviceProfile
    page_size: int
    max_draft: int  # most draft tokens of one request and step
    trees: bool  # trees can be drafted and verified here; if not, draft chains
    tokenizer: Callable[[], Tokenizer]
    open_model: Callable[[str], OtherModel]
    """Finds another model by what `model.source` would say; raises EngineError with a sentence."""
    find: Callable[[str], Path]
    """The folder or file of what is no model, such as a draft head, by the same spelling; raises likewise."""
    find_linears: Callable[[str], Callable[[], Quantization]]
    """Finds another quantization than the model's by its name; what comes back builds it, on the runner's thread.
    Raises EngineError if none of that name suits device and dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentPlan:
    """What a resident asks of the core."""

    taps: TargetTaps = TargetTaps()
    kv: AttentionShape | None = None
    """Attention of the resident's own layers, all alike but for the window; None keeps no KV. The KV has the pages of
    the target's: what is stored for a position lies in the same page and offset as the target's KV of that position,
    so prefix hits, preemption and rollback need no word from the resident."""
    places: int = 0
    """Most items that one `draft` stores for a request. They are scratch: after the step only what `extend` stores
    counts."""
    forks: bool = False
    """Whether drafts may be trees; without forks a resident that is `graph_safe` drafts chains in graphs on CUDA."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The target with its weights in memory, as far as a resident may use it."""

    profile: ModelProfile
    embed: Callable[[Tensor], Tensor]  # tokens int64 [...] -> [..., hidden], as the model's first layer gets them
    logits: Callable[[Tensor], Tensor]
    """[N, hidden after the final norm] -> float32 [N, vocab]; a buffer that the next call may overwrite."""
    open_weights: Callable[[], WeightSource]  # the target's checkpoint once more; close it after reading
    next_modules: Callable[[], Sequence[NextModule]]
    """Reads what the checkpoint holds for predicting further tokens, see `Model.next_modules`."""
    linears: Quantization
    ops: Ops
    device: torch.device
    dtype: torch.dtype
    slots: int  # that batches name: one for each request at once, and one more for padding
    max_positions: int  # one more than the largest position, drafts included


@dataclass(slots=True, kw_only=True)
class DraftBatch(ABC):
    """R requests to be drafted for. Each one's newest token stands at `positions[r]` and is not computed by the target
    yet; `extend` has stored everything before that position."""

    slots: Tensor  # int64 [R]
    tokens: Tensor  # int64 [R], the newest of each request
    positions: Tensor  # int64 [R], where they stand
    rooms: Sequence[int]  # [R], most draft tokens of each; at least 1
    params: Sequence[SamplingParams]  # [R]
    seeds: Sequence[int]  # [R]

    @abstractmethod
    def step(self, first: int, positions: Tensor, sees: Tensor | None = None) -> Forward:
        """Attention for n more items of every request, stored at its places first, …, first + n - 1.

        Place j is scratch KV behind what `extend` has stored: the row of position `self.positions[r] + j`. Items see
        everything stored by `extend`, and of the places what `sees` says.

        Args:
            first: of the places; those before it hold what earlier steps of this draft stored.
            positions: int64 [R, n], of the items; siblings share one.
            sees: bool [R, n, first + n], the item itself included; None is causal, and then `n` is 1 or a chain.

        Returns:
            What runs the resident's layers on R * n items in the order of `positions`; each layer once.
        """


@dataclass(slots=True, kw_only=True)
class ExtendBatch:
    """Tokens of R requests, T in all, that the target has computed and that stand for good.

    Within a request they follow each other, and the whole of the request in the calls since it was admitted; only
    after a gap (KV from elsewhere, a time without drafting) does a call begin anew at a page's first position. On CUDA,
    rows behind the `last` one of a request may be padding: they are computed like the others, and don't count.
    """

    slots: Tensor  # int64 [R]
    counts: Sequence[int]  # [R], tokens of each request
    last: Tensor  # int64 [R], index of each request's last token among the T
    tokens: Tensor  # int64 [T]
    next_tokens: Tensor  # int64 [T], what follows each of them: the next of its request, sampled just now for the last
    positions: Tensor  # int64 [T]
    hidden: Tensor | None  # [T, taps, hidden size]: the tapped layers in ascending order, then the final state
    step: Forward  # runs the resident's layers on T items, stored at `positions`; causal; each layer once


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafted:
    """What `draft` proposes, n nodes for each request at most; those beyond its room are cut off.

    Every beginning of a row must be a tree of its own (parents come before their children), the best nodes first; the
    children of a node are distinct tokens. Without `parents` a row is a chain.
    """

    tokens: Tensor  # int64 [R, n]
    parents: Tensor | None = None  # int64 [R, n]; index of the node that each follows, -1 for the newest token
    counts: Sequence[int] | None = None  # [R], how many of the n are meant; None is all of them
    probs: Tensor | None = None
    """float32 [R, n, vocab]: the distribution each was sampled from; without it nodes count as point masses. Siblings
    were drawn one after the other without replacement: each from its distribution, renormalized without the earlier
    ones."""


class ResidentSpeculator(ABC):
    """A drafting model beside the target. Wrong or invalid drafts cost time, never correctness.

    Item t is what the resident keeps for position t: its KV row, and in whatever buffers of its own, indexed by slot,
    what the next draft starts from. After `extend` the items of all tokens but the newest are stored. A head that
    pairs the target's state at t with the token at t + 1 stores the pair as item t, and can tell its first draft token
    from the last item; a model that reads tokens stores token t as item t, and drafts from place 0 on.
    """

    @abstractmethod
    def plan(self, checkpoint: Checkpoint) -> ResidentPlan:
        """What it needs for this target; called before anything is allocated.

        Raises:
            ValueError: it can't draft for this target; the sentence says what was expected and what there is.
        """

    @abstractmethod
    def load(self, target: Target) -> None:
        """Read the weights and make the buffers."""

    @abstractmethod
    def draft(self, batch: DraftBatch) -> Drafted:
        """Draft tokens for every request of the batch.

        On CUDA nothing here should wait for the device. What claims `graph_safe` is captured in a graph there, `extend`
        as well: it drafts as many tokens as the rooms say, in chains, and reads nothing of `params` and `seeds`.
        """

    @abstractmethod
    def extend(self, batch: ExtendBatch) -> None:
        """Store the items of tokens that stand, and keep per slot what the next draft starts from."""

    def weight_bytes(self) -> int:
        """Bytes that the resident's weights take in memory, for reports; 0 if not told."""
        return 0


AnySpeculator: TypeAlias = Speculator | ResidentSpeculator

BUILDS: Final = (Speculator, ResidentSpeculator)


@hookspec
def speculators() -> Iterable[Offer[Speculator] | Offer[ResidentSpeculator]]:  # type: ignore[empty-body]
    """Offer speculators. Must not import torch."""


__all__ = [
    "API",
    "HOOK",
    "AnySpeculator",
    "Checkpoint",
    "Draft",
    "DraftBatch",
    "DraftContext",
    "Drafted",
    "ExtendBatch",
    "OtherModel",
    "ResidentPlan",
    "ResidentSpeculator",
    "Speculator",
    "Target",
    "TargetTaps",
    "speculators",
]
