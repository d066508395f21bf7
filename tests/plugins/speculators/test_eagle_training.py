"""Training of EAGLE heads: the mathematics against plain versions, the text, and a whole run on a tiny target."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import BaseModel
from safetensors.torch import load_file
from torch import Tensor

from engine.errors import ConfigError, ResourceError
from engine.llm import LLM
from engine.plugins.speculators import eagle
from engine.plugins.speculators.eagle.files import HeadWeights, weight_file
from engine.plugins.speculators.eagle.module import Attend, EagleModule, Unrolled
from engine.plugins.speculators.eagle.shape import read_shape
from engine.plugins.speculators.eagle.training.attend import FusedUnrolled
from engine.plugins.speculators.eagle.training.config import (
    ChatSection,
    DataSection,
    DocumentSection,
    EvaluationSection,
    HeadSection,
    ScheduleSection,
    TrainConfig,
)
from engine.plugins.speculators.eagle.training.evaluation import agreements
from engine.plugins.speculators.eagle.training.loss import SoftCrossEntropy, teach, unrolled_loss
from engine.plugins.speculators.eagle.training.run import Watchers, make_students, open_target, train, vocabulary
from engine.plugins.speculators.eagle.training.target import Target
from engine.plugins.speculators.eagle.training.trainer import states_of
from engine.plugins.speculators.eagle.training.writing import ASSISTANT, USER, Opening, Scripts, Writer
from engine.sampling_params import SamplingParams
from engine.testing.cli_command import CLICommandConformance
from engine.testing.tokenizer import save_byte_tokenizer

TARGET: dict[str, Any] = {
    "device": {"kind": "cpu", "threads": 1},
    "kv_cache": {"page_size": 8, "pages": 64},
    "grammar": "none",
}


class TestTrain(CLICommandConformance):
    (offer,) = eagle.cli_commands()
    module = "engine.plugins.speculators.eagle"


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny products only wait for a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama of bytes, with five layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=260,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=5,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        initializer_range=0.8,
        bos_token_id=None,
        eos_token_id=256,
    )
    made = tmp_path_factory.mktemp("target")
    LlamaForCausalLM(config).save_pretrained(made)
    save_byte_tokenizer(made)
    return made


def configured(folder: Path, output: Path, **more: Any) -> TrainConfig:
    """A run of some seconds."""
    tree: dict[str, Any] = {
        "target": TARGET | {"model": {"source": f"path:{folder}", "dtype": "float32"}},
        "output": output,
        "draft_vocab": 96,
        "heads": {
            "plain": {"steps": 3, "storage": "float32"},
            "normed": {"steps": 2, "fc_norm": True, "norm_output": True, "storage": "int8"},
        },
        "data": {
            "tokens": 500,
            "texts": [str(Path(__file__))],
            "file": output / "text.npz",
            "chats": {"rows": 16, "tokens": 60, "assistant_turn": 40, "user_turn": 12},
            "documents": {"rows": 2, "context": 90, "tokens": 10},
        },
        "training": {"steps": 32, "batch_tokens": 192, "contexts": [48, 96], "learning_rate": 0.01, "warmup": 2},
    }
    return TrainConfig.model_validate(tree | more)


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return open_target(configured(folder, folder))


# Mathematics


def test_fused_attention_is_the_plain_one_forwards_and_backwards() -> None:
    torch.manual_seed(0)
    steps = [[torch.randn(2, heads, 19, 8, requires_grad=True) for heads in (4, 2, 2)] for _ in range(4)]
    weights = [torch.randn(2, 4, 19, 8) for _ in steps]

    def run(attend: Attend) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        outs = [attend(*step) for step in steps]
        total = torch.stack([(out * weight).sum() for out, weight in zip(outs, weights, strict=True)]).sum()
        return outs, torch.autograd.grad(total, [x for step in steps for x in step])

    for plain, fused in zip(run(Unrolled()), run(FusedUnrolled()), strict=True):
        for expected, found in zip(plain, fused, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_soft_cross_entropy_is_torch_s() -> None:
    torch.manual_seed(0)
    logits, probabilities = torch.randn(7, 11, requires_grad=True), torch.randn(7, 11).softmax(-1)
    expected = torch.nn.functional.cross_entropy(logits, probabilities, reduction="none")
    found = SoftCrossEntropy.apply(logits, probabilities)
    torch.testing.assert_close(found, expected)
    weights = torch.randn(7)
    torch.testing.assert_close(
        *(torch.autograd.grad((loss * weights).sum(), logits)[0] for loss in (found, expected)),
    )


def test_each_step_is_taught_what_the_target_says_one_token_later(target: Target, folder: Path) -> None:
    """The loss against one written down position by position, with `transformers` as the target."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    steps, ids, draws = 3, torch.arange(0, 260, 3), np.random.default_rng(1)
    tokens, taught = draws.integers(0, 260, (2, 17), dtype=np.int32), torch.rand(2, 17) < 0.7
    states = states_of(target, tokens, (2, 2, 3))
    lesson = teach(target, states, taught, ids, steps, torch.float32, temperature=0.7)
    head = EagleModule(read_shape(small_head(len(ids))), 64)
    head.set_vocabulary(ids)
    found, _ = unrolled_loss(head, lesson, steps)

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ragged = torch.from_numpy(tokens).long()
    with torch.no_grad():
        out = model(ragged, output_hidden_states=True)
    features = torch.stack([out.hidden_states[layer] for layer in (2, 2, 3)], 2)
    torch.testing.assert_close(states.taps, features, rtol=2e-3, atol=2e-3)
    inside, cross_entropy = out.logits[..., ids], torch.nn.functional.cross_entropy
    wanted = [
        (row, at)
        for row in range(2)
        for at in range(steps, 17)
        if taught[row, at] and inside[row, at].max() == out.logits[row, at].max()
    ]
    assert 0 < len(wanted) < 28
    embeddings = model.get_input_embeddings()(ragged)
    hidden, attend, expected = head.fuse(features), Unrolled(), torch.zeros(())
    for step in range(steps):
        places = (torch.arange(17) + step).expand(2, -1)
        hidden, normed = head(torch.roll(embeddings, -1 - step, 1), hidden, places, attend)
        losses = [
            cross_entropy(head.logits(normed[row, at - 1 - step]), (inside[row, at] / 0.7).softmax(-1))
            for row, at in wanted
        ]
        expected = expected + 0.8**step * torch.stack(losses).mean()
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def small_head(draft_vocab: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 260,
        "draft_vocab_size": draft_vocab,
        "max_position_embeddings": 64,
        "fc_norm": True,
    }


# Text


def written(target: Target, openings: list[Opening], scripts: Scripts, heat: float, limit: int, steps: int) -> Any:
    rows = len(openings)
    temperatures, limits = torch.full((rows, 2), heat), torch.full((rows, 2), limit)
    return Writer(target, openings, scripts, temperatures, limits, steps=steps, seed=1, graph=False).write()


def test_greedy_rows_are_what_the_engine_writes(target: Target, folder: Path) -> None:
    prompts = [[7, 8, 9], list(range(40, 75)), [200, 3]]
    openings = [Opening(tokens=prompt, turns=False) for prompt in prompts]
    found = written(target, openings, Scripts(after=((0,), (0,))), 0.0, 1000, 20)
    with LLM(configured(folder, folder).target) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
        expected = [one.token_ids for one in llm.generate(prompts, params)]
    for row, prompt in enumerate(prompts):
        assert found.tokens[row, len(prompt) : len(prompt) + 20].tolist() == expected[row]
        assert found.spoken[row, len(prompt) : len(prompt) + 20].all()
        assert not found.spoken[row, : len(prompt)].any()


def test_roles_change_by_force_and_only_the_assistant_s_words_are_taught(target: Target) -> None:
    scripts = Scripts(after=((250, 251, 252), (253, 254)), ends=(256,))
    openings = [Opening(tokens=[1, 2], speaker=USER), Opening(tokens=[3, 4, 5], speaker=ASSISTANT)]
    found = written(target, openings, scripts, 0.0, 4, 20)
    for row, opening in enumerate(openings):
        speaker, at, said = opening.speaker, len(opening.tokens), 0
        while at < len(opening.tokens) + 20:
            token, script = found.tokens[row, at], scripts.after[speaker]
            assert found.spoken[row, at] == (speaker == ASSISTANT)
            said += 1
            if token == script[0]:
                rest = list(script[1:])[: len(opening.tokens) + 20 - at - 1]
                assert found.tokens[row, at + 1 : at + 1 + len(rest)].tolist() == rest
                assert not found.spoken[row, at + 1 : at + 1 + len(rest)].any()
                at, speaker, said = at + len(script), 1 - speaker, 0
            else:
                assert said < 4, "the turn has grown too long"
                at += 1


# A whole run


@pytest.fixture(scope="module")
def trained(folder: Path, target: Target, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """Heads of a whole run, and what was reported of it."""
    output, told = tmp_path_factory.mktemp("heads"), list[Any]()
    watch = Watchers(training=lambda step, share, heads: told.append((step, dict(heads))))
    told.append(train(configured(folder, output), target, watch))
    return output, told


def test_the_loss_falls(trained: tuple[Path, list[Any]]) -> None:
    _, told = trained
    *steps, measured = told
    assert [step for step, _ in steps] == [10, 20, 30]
    for name in ("plain", "normed"):
        losses = [heads[name][0] for _, heads in steps]
        assert losses[-1] < 0.9 * losses[0], losses
    assert {cell.head for cell in measured} == {"plain", "normed"}
    assert all(1 <= cell.length <= 5 for cell in measured)


def test_a_run_that_stopped_goes_on_to_the_same_weights(
    trained: tuple[Path, list[Any]], folder: Path, target: Target, tmp_path: Path
) -> None:
    output, _ = trained
    (tmp_path / "text.npz").write_bytes((output / "text.npz").read_bytes())
    whole = configured(folder, tmp_path)

    class Stop(Exception):
        pass

    def stop(step: int, share: float, heads: Any) -> None:
        raise Stop

    with pytest.raises(Stop):
        train(whole, target, Watchers(training=stop))
    assert (tmp_path / "plain" / "model.safetensors").exists(), "what was learnt is written however a run ends"
    train(whole, target, Watchers())
    for name in ("plain", "normed"):
        expected, found = (load_file(path / name / "model.safetensors") for path in (output, tmp_path))
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[key], found[key]) for key in expected)


def test_training_goes_on_from_a_head_with_its_vocabulary(
    trained: tuple[Path, list[Any]], folder: Path, target: Target, tmp_path: Path
) -> None:
    start = trained[0] / "plain"
    heads = {"more": {"start": start, "storage": "float32"}}
    config = configured(folder, tmp_path, heads=heads, draft_vocab=5)
    ids = torch.from_numpy(vocabulary(config, target, []))
    expected = load_file(start / "model.safetensors")
    assert ids.tolist() == (expected["d2t"] + torch.arange(96)).tolist()
    (student,), _ = make_students(config, target, ids)
    found = student.head.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    for wrong, words in (
        ({"start": tmp_path}, "holds no weights"),
        ({"start": start, "fc_norm": True}, "lacks tensor"),
    ):
        with pytest.raises(ConfigError, match=rf"heads\.more\.start: .*{words}"):
            train(configured(folder, tmp_path, heads={"more": wrong}), target, Watchers())


@pytest.mark.parametrize("name", ["plain", "normed"])
def test_a_head_is_in_the_public_format_and_serves_its_target(
    name: str, trained: tuple[Path, list[Any]], folder: Path
) -> None:
    head = trained[0] / name
    config = json.loads((head / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    with closing(HeadWeights(weight_file(head))) as weights:
        read_shape(config)
        assert {"fc.weight", "midlayer.self_attn.q_proj.weight", "lm_head.weight", "d2t", "t2d"} <= set(weights.names())
        if name == "normed":
            assert weights.get("lm_head.weight", torch.float32).shape == (96, 32)
    plain = configured(folder, head).target
    spoken = plain.model_copy(
        update={"speculator": plain.speculator.model_validate({"use": "eagle", "options": {"head": f"path:{head}"}})}
    )
    prompts, texts = [[7, 8, 9], list(range(40, 60))], []
    for engine in (plain, spoken):
        with LLM(engine) as llm:
            texts.append(
                [one.token_ids for one in llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=16))]
            )
    assert texts[0] == texts[1]


# Evaluation


def test_agreements_are_the_head_s_own_chains(target: Target) -> None:
    """Drafting from each position by itself, one token after the other, gives the same counts."""
    torch.manual_seed(4)
    ids, tokens = torch.arange(0, 260, 2), np.random.default_rng(2).integers(0, 130, (1, 14), dtype=np.int32) * 2
    head = EagleModule(read_shape(small_head(len(ids))), 64)
    head.set_vocabulary(ids)
    states, text = states_of(target, tokens, (2, 2, 3)), torch.from_numpy(tokens).long()
    embed = dict(zip(text[0].tolist(), states.embeddings[0], strict=True))
    text[0, 5:8] = chain(head, states, text, embed, 3, 3)
    states = states_of(target, text.numpy().astype(np.int32), (2, 2, 3))
    found = agreements(head, states, text, 3, torch.float32)[0].tolist()
    assert found[-2:] == [0, 0]
    embed = dict(zip(text[0].tolist(), states.embeddings[0], strict=True))
    for at in range(10):
        drafted, right = chain(head, states, text, embed, at, 3), 0
        while right < 3 and drafted[right] == text[0, at + 2 + right]:
            right += 1
        assert found[at] == right
    assert max(found) > 0


def chain(head: EagleModule, states: Any, text: Tensor, embed: dict[int, Tensor], at: int, count: int) -> Tensor:
    """The tokens that the head drafts after the pair of `at` and `at + 1`; of what it drafts only known embeddings."""
    hidden, attend, drafted = head.fuse(states.taps[:, : at + 1]), Unrolled(), list[int]()
    embeddings = states.embeddings[:, 1 : at + 2]
    for step in range(count):
        places = torch.arange(at + 1)[None] + step
        hidden, normed = head(embeddings, hidden, places, attend)
        drafted.append(int(head.target_ids(head.logits(normed[0, -1]).argmax())))
        newest = embed.get(drafted[-1], torch.zeros_like(embeddings[0, 0]))
        embeddings = torch.cat((embeddings[:, 1:], newest[None, None]), 1)
    return torch.tensor(drafted)


# Bad input, and the page


def test_the_page_has_every_key() -> None:
    page = (Path(__file__).parents[3] / "docs" / "training-eagle.md").read_text()
    sections = [("", TrainConfig), ("heads.NAME.", HeadSection), ("data.", DataSection), ("training.", ScheduleSection)]
    sections += [("evaluation.", EvaluationSection), ("data.chats.", ChatSection), ("data.documents.", DocumentSection)]
    for prefix, section in sections:
        for name, field in section.model_fields.items():
            if (not isinstance(field.default, BaseModel) and (prefix or name != "heads")) or name == "target":
                assert f"| `{prefix}{name}` | " in page
                assert str(field.description) in page


def test_what_is_wrong_with_a_configuration_is_said(folder: Path, target: Target, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no file matches"):
        train(configured(folder, tmp_path, data={"texts": [str(tmp_path / "*.txt")]}), target, Watchers())
    bare = configured(folder, tmp_path, data={"chats": {"rows": 0}, "documents": {"rows": 2}})
    with pytest.raises(ConfigError, match=r"name files with text in data\.texts"):
        train(bare, target, Watchers())
    wordy = configured(folder, tmp_path, data={"chats": {"tokens": 300}})
    with pytest.raises(ConfigError, match="beyond the target's context of 256"):
        train(wordy, target, Watchers())
    small = {"tokens": 1, "chats": {"rows": 2, "tokens": 30}}
    for contexts, words in (([250], "fill no row"), ([300], "the target's context is 256")):
        with pytest.raises(ConfigError, match=words):
            train(configured(folder, tmp_path, data=small, training={"contexts": contexts}), target, Watchers())
    (tmp_path / "checkpoint.safetensors").write_bytes(b"something else")
    with pytest.raises(ResourceError, match="no checkpoint of these heads"):
        train(configured(folder, tmp_path), target, Watchers())
