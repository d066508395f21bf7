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
from safetensors.torch import load_file
from torch import Tensor

from engine.errors import ConfigError, ResourceError
from engine.llm import LLM
from engine.plugins.speculators import eagle
from engine.plugins.speculators.eagle.files import HeadWeights, weight_file
from engine.plugins.speculators.eagle.module import Attend, EagleModule, Unrolled
from engine.plugins.speculators.eagle.shape import read_shape
from engine.plugins.speculators.eagle.training.attend import FusedUnrolled
from engine.plugins.speculators.eagle.training.config import TrainConfig
from engine.plugins.speculators.eagle.training.dataset import Batches, Document, frequent, load, pack, save
from engine.plugins.speculators.eagle.training.evaluation import acceptance, agreements
from engine.plugins.speculators.eagle.training.loss import SoftCrossEntropy, teach, unrolled_loss
from engine.plugins.speculators.eagle.training.openings import between_turns, scripts_of
from engine.plugins.speculators.eagle.training.run import Watchers, open_target, train
from engine.plugins.speculators.eagle.training.student import stored
from engine.plugins.speculators.eagle.training.target import Target
from engine.plugins.speculators.eagle.training.trainer import states_of
from engine.plugins.speculators.eagle.training.writing import ASSISTANT, USER, Opening, Scripts, Writer, draw
from engine.sampling_params import SamplingParams
from engine.testing.cli_command import CLICommandConformance
from engine.testing.tokenizer import byte_tokenizer, save_byte_tokenizer

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
    lesson = teach(target, states, taught, ids, steps, torch.float32)
    head = EagleModule(read_shape(small_head(len(ids))), 64)
    head.set_vocabulary(ids)
    found, _ = unrolled_loss(head, lesson, steps)

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ragged = torch.from_numpy(tokens).long()
    with torch.no_grad():
        out = model(ragged, output_hidden_states=True)
    features = torch.stack([out.hidden_states[layer] for layer in (2, 2, 3)], 2)
    torch.testing.assert_close(states.taps, features, rtol=2e-3, atol=2e-3)
    inside = out.logits[..., ids]
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
            torch.nn.functional.cross_entropy(head.logits(normed[row, at - 1 - step]), inside[row, at].softmax(-1))
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


def test_draws_follow_the_temperature() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -9.0]).repeat(40_000, 1)
    drawn = draw(logits, torch.full((40_000,), 0.7))
    share = torch.bincount(drawn, minlength=4).double() / 40_000
    expected = torch.tensor([0.0, 1.0, 2.0]).div(0.7).softmax(0).double()
    torch.testing.assert_close(share[:3], expected, rtol=0, atol=0.01)
    assert share[3] == 0, "a token far below the likeliest is never drawn"
    assert (draw(logits, torch.zeros(40_000)) == 2).all()


def test_the_words_between_turns_come_from_the_chat_template() -> None:
    tokenizer = byte_tokenizer()
    before, after_user, after_assistant = between_turns(tokenizer, "Be brief.")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"}]
    messages += [{"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    whole = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
    assert whole.startswith(before + "a" + after_user + "b" + after_assistant + "c")
    assert tokenizer.decode(list(scripts_of(tokenizer).after[0]), skip_special_tokens=False) == after_user


def test_text_survives_its_file(tmp_path: Path) -> None:
    documents = [Document(np.arange(n, dtype=np.int32), np.arange(n) % 3 == 0) for n in (5, 1, 12)]
    save(tmp_path / "text.npz", documents)
    for kept, document in zip(load(tmp_path / "text.npz"), documents, strict=True):
        assert kept.tokens.tolist() == document.tokens.tolist()
        assert kept.taught.tolist() == document.taught.tolist()
    (tmp_path / "text.npz").write_bytes(b"something else")
    with pytest.raises(ResourceError, match="holds no training text"):
        load(tmp_path / "text.npz")


def test_rows_are_the_documents_end_to_end_and_batches_take_each_row_once() -> None:
    documents = [Document(np.full(n, n, dtype=np.int32), np.ones(n, dtype=bool)) for n in (9, 20, 33)]
    rows = pack(documents, 8)
    assert rows.tokens.flatten().tolist() == np.concatenate([d.tokens for d in documents])[:56].tolist()
    batches = Batches([rows, pack(documents, 16)], 24, seed=3)
    epoch = [batches.at(step) for step in range(batches.per_epoch)]
    assert sorted(batch.tokens.shape for batch in epoch) == [(1, 16)] * 3 + [(3, 8)] * 2
    again = Batches([rows, pack(documents, 16)], 24, seed=3).at(batches.per_epoch + 1)
    assert again.tokens.tolist() == batches.at(batches.per_epoch + 1).tokens.tolist()


def test_the_draft_vocabulary_is_what_is_taught_most() -> None:
    document = Document(np.array([5, 5, 3, 3, 3, 9, 1, 1, 1, 1]), np.array([True] * 6 + [False] * 4))
    assert frequent([document], 12, 2).tolist() == [3, 5]


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


def test_int8_storage_rounds_each_row_by_its_own_scale() -> None:
    weight = torch.randn(6, 40) * torch.tensor([1e-3, 0.1, 1, 5, 100, 0])[:, None]
    kept = stored({"x.weight": weight, "norm.weight": weight[0], "d2t": torch.arange(3)}, "int8")
    back = kept["x.weight"].float() * kept["x.weight_scale"]
    assert ((back - weight).abs() <= weight.abs().amax(1, keepdim=True) / 254 + 1e-12).all()
    assert kept["norm.weight"].dtype is torch.float32
    assert kept["d2t"].tolist() == [0, 1, 2]


# Evaluation


def test_acceptance_by_hand() -> None:
    found = [2, 9, 9, 0, 1, 9]  # after the pair of a newest token at 1, 2, …; those of 9 are never looked at
    assert acceptance(found, 1, 8, 2) == (3 + 1 + 2, 3)
    assert acceptance(found, 1, 7, 2) == (3 + 1, 2), "a chain that reaches past the end is left out"
    assert acceptance(found, 6, 7, 4) == (0, 0)


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


# Bad input


def test_what_is_wrong_with_a_configuration_is_said(folder: Path, target: Target, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no file matches"):
        train(configured(folder, tmp_path, data={"texts": [str(tmp_path / "*.txt")]}), target, Watchers())
    few = configured(folder, tmp_path)
    long = few.model_copy(update={"training": few.training.model_copy(update={"contexts": [100_000]})})
    with pytest.raises(ConfigError, match="fill no row"):
        train(long, target, Watchers())
    (tmp_path / "checkpoint.safetensors").write_bytes(b"something else")
    with pytest.raises(ResourceError, match="no checkpoint of these heads"):
        train(few, target, Watchers())
