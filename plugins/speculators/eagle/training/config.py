"""The YAML file of `engine train eagle`: which target, what text, which heads, how long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from engine.config.model import EngineConfig
from engine.plugin import KVKind, Options
from engine.specs.model import ModelProfile

_OUTPUTS: Final = "eagle_aux_hidden_state_layer_ids"
"""Public configs count the layers whose output is wanted."""

Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]


class HeadSection(Options):
    """One head. What is unset is as in the target."""

    intermediate: Count | None = Field(default=None, description="Width of the feed-forward layer.")
    heads: Count | None = Field(default=None, description="Query heads.")
    kv_heads: Count | None = Field(default=None, description="Key and value heads.")
    fc_norm: bool = Field(default=False, description="Normalise each of the target's states first (EAGLE-3.1).")
    norm_output: bool = Field(default=False, description="Go on from the normalised state (EAGLE-3.1).")
    steps: int = Field(default=7, ge=1, le=16, description="Steps of the unrolling in training.")
    start: Path | None = Field(
        default=None, description="Folder of a head of the same shape to go on from, with its draft vocabulary."
    )
    storage: Literal["float32", "bfloat16", "float16", "int8"] = Field(
        default="float16",
        description="How the weights are written; int8 has a scale per row, and other engines can't read it.",
    )


class ChatSection(Options):
    """Conversations that the target has with itself."""

    rows: int = Field(default=64, ge=0, description="Rows written at once.")
    tokens: Count = Field(default=512, description="Tokens written in each row.")
    piece_share: Share = Field(default=0.1, description="Share of rows that go on with a piece of `texts` instead.")
    question_share: Share = Field(
        default=0.7, description="Share of rows that begin with one of `questions`, if there are any."
    )
    user_turn: Count = Field(default=120, description="Most tokens that the target says as the user.")
    assistant_turn: Count = Field(default=400, description="Most tokens that it answers.")
    greedy_share: Share = Field(
        default=0.5, description="Share of rows whose answers are greedy; others draw at 0.3 to 1."
    )


class DocumentSection(Options):
    """Long texts with a task, which the target does: so a head sees long contexts."""

    rows: int = Field(default=0, ge=0, description="Rows written at once.")
    context: Count = Field(default=2048, description="Tokens of the longest text.")
    tokens: Count = Field(default=256, description="Tokens written in each row.")
    every: Count = Field(default=8, description="One round of documents after so many rounds of conversations.")


class DataSection(Options):
    """The text to learn from."""

    file: Path | None = Field(
        default=None, description="Where the text is kept; if the file exists, it is not written again."
    )
    texts: list[str] = Field(
        default=[], description="Glob patterns of plain files: pieces and documents are cut from them."
    )
    questions: list[str] = Field(
        default=[],
        description="Glob patterns of files of questions that the target answers: on each line a pattern with "
        "alternatives in brackets.",
    )
    tokens: Count = Field(default=200_000, description="Tokens that the target writes.")
    minutes: float | None = Field(default=None, gt=0, description="Stop writing after so long.")
    chats: ChatSection = Field(default=ChatSection(), description="Conversations.")
    documents: DocumentSection = Field(default=DocumentSection(), description="Long texts.")
    repeats: int = Field(
        default=0, ge=0, description="Teach no run of 8 tokens that came so often before in its text; 0 teaches all."
    )
    seed: int = Field(default=0, description="Of all draws.")


class ScheduleSection(Options):
    """How the heads are trained; all at once, on the same batches."""

    steps: Count = Field(default=1000, description="Batches.")
    minutes: float | None = Field(
        default=None, gt=0, description="Stop after so long; the learning rate falls accordingly."
    )
    batch_tokens: Count = Field(default=4096, description="Tokens of a batch.")
    contexts: list[Annotated[int, Field(ge=16)]] = Field(
        default=[512], min_length=1, description="Lengths of rows, mixed."
    )
    temperature: float = Field(
        default=1.0,
        gt=0,
        description="Of the target's distribution in lessons; below 1 its first choice, which is drafted, "
        "counts for more.",
    )
    learning_rate: float = Field(default=1e-3, gt=0, description="At its highest; it falls to nothing as a cosine.")
    warmup: int = Field(default=50, ge=0, description="Steps in which it rises.")
    clip: float = Field(default=1.0, gt=0, description="Longest gradient.")
    checkpoint_every: Count = Field(default=500, description="Steps between checkpoints.")
    seed: int = Field(default=0, description="Of the weights and of the order of batches.")


class EvaluationSection(Options):
    """What acceptance is measured on: the target's greedy answers to prompts that it wasn't trained on."""

    prompts: Path | None = Field(
        default=None, description="JSON lines with `class` and `prompt`; text held back if unset."
    )
    filler: list[str] = Field(default=[], description="Glob patterns of files that fill a prompt up to a context.")
    contexts: list[Annotated[int, Field(ge=0)]] = Field(
        default=[0], min_length=1, description="Tokens of context before the answer; 0 is the prompt as it is."
    )
    tokens: Count = Field(default=128, description="Tokens of each answer.")
    draft: int = Field(default=4, ge=1, le=16, description="Draft tokens of a chain.")


class TrainConfig(Options):
    """The whole file."""

    target: EngineConfig = Field(default=EngineConfig(), description="The engine's own configuration of the target.")
    output: Path = Field(default=Path("heads"), description="Folder: one folder per head, and the checkpoint.")
    draft_vocab: Count = Field(default=8192, description="How many of the target's tokens the heads can draft.")
    layers: list[Annotated[int, Field(ge=1)]] | None = Field(
        default=None,
        min_length=1,
        description="Layers of the target whose incoming states the heads see; if unset the third, the middle one and "
        "the third from the end.",
    )
    heads: dict[Annotated[str, Field(pattern=r"^\w[\w.-]*$")], HeadSection] = Field(
        min_length=1, description="Heads by name, which is that of their folder in `output`."
    )
    data: DataSection = Field(default=DataSection(), description="The text.")
    training: ScheduleSection = Field(default=ScheduleSection(), description="The schedule.")
    evaluation: EvaluationSection = Field(default=EvaluationSection(), description="The measure.")


def head_config(
    section: HeadSection,
    profile: ModelProfile,
    target: Mapping[str, Any],
    *,
    draft_vocab: int,
    layers: Sequence[int] | None,
) -> dict[str, Any]:
    """The head's `config.json` in the public format, for a target with this profile and `config.json`."""
    grouped = profile.kv_kind is KVKind.GQA
    heads = section.heads or profile.heads
    head_dim = profile.head_dim if grouped else profile.hidden_size // profile.heads
    rope = {name: target[name] for name in ("rope_theta", "rope_scaling", "rope_parameters") if target.get(name)}
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": profile.hidden_size,
        "intermediate_size": section.intermediate or int(target.get("intermediate_size", 4 * profile.hidden_size)),
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": section.kv_heads or (profile.kv_heads if grouped else heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": profile.max_context,
        "vocab_size": profile.vocab_size,
        "draft_vocab_size": draft_vocab,
        "tie_word_embeddings": False,
        "fc_norm": section.fc_norm,
        "norm_output": section.norm_output,
        "torch_dtype": "float32" if section.storage == "int8" else section.storage,
        "trained_for": {
            "architecture": profile.architecture,
            "layers": profile.layers,
            "hidden_size": profile.hidden_size,
            "vocab_size": profile.vocab_size,
        },
        **rope,
        **({} if layers is None else {"eagle_config": {_OUTPUTS: [layer - 1 for layer in layers]}}),
    }


__all__ = [
    "ChatSection",
    "DataSection",
    "DocumentSection",
    "EvaluationSection",
    "HeadSection",
    "ScheduleSection",
    "TrainConfig",
    "head_config",
]
