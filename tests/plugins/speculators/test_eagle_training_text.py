"""Training of EAGLE heads: text, batches, storage and the measure, none of which needs a model."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from engine.checkpoint import read_json
from engine.errors import ConfigError, ResourceError
from engine.plugins.speculators.eagle.files import HeadWeights, weight_file
from engine.plugins.speculators.eagle.shape import read_shape, tensors
from engine.plugins.speculators.eagle.shipped import HEADS
from engine.plugins.speculators.eagle.training.dataset import (
    Batches,
    Document,
    frequent,
    load,
    pack,
    save,
    without_repeats,
)
from engine.plugins.speculators.eagle.training.evaluation import acceptance
from engine.plugins.speculators.eagle.training.openings import SENTENCES, TOPICS, Openings, between_turns, scripts_of
from engine.plugins.speculators.eagle.training.questions import Questions, passages
from engine.plugins.speculators.eagle.training.student import stored
from engine.plugins.speculators.eagle.training.writing import ASSISTANT, draw
from engine.testing.tokenizer import byte_tokenizer


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


PROMPTS = Path(__file__).parents[3] / "benchmarks" / "prompts"
PROSE = (
    "A lamp stood on the table by the window, and nobody had lit it since the {old} man went away, so it was dusty.\n"
)


def test_questions_are_drawn_from_their_patterns() -> None:
    texts = [PROSE.replace("{old} ", "")]
    questions = Questions(
        ["{Say|Write} {one|{two|three}} {@word}s", "", "{passage}\\nWhat?"], {"word": ["cat"]}, texts, Random(1)
    )
    drawn = {questions.draw() for _ in range(300)}
    said = {f"{verb} {count} cats" for verb in ("Say", "Write") for count in ("one", "two", "three")}
    assert drawn == said | {f"{texts[0].strip()}\nWhat?"}
    assert passages([PROSE]) == [], "a paragraph with brackets is no prose"


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("{a|b", "unequal brackets"),
        ("a}", "unequal brackets"),
        ("{@x}", r"the list @x; there are \['y'\]"),
        ("{passage}", "no file"),
    ],
)
def test_a_pattern_that_makes_no_question_is_refused(pattern: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Questions([pattern], {"y": ["z"]}, [], Random(1))


def test_no_prompt_of_the_measure_is_among_the_questions() -> None:
    lines = (PROMPTS / "questions.txt").read_text(encoding="utf-8").splitlines()
    lists = {"topic": TOPICS, "sentence": SENTENCES}
    questions = Questions(lines, lists, [PROSE.replace("{old} ", "")], Random(5))
    measure = {
        json.loads(line)["prompt"] for line in (PROMPTS / "speculation.jsonl").read_text(encoding="utf-8").splitlines()
    }
    assert not measure & {questions.draw() for _ in range(20_000)}
    assert not measure & set(SENTENCES)


def test_a_question_is_followed_by_the_answer() -> None:
    openings = Openings(byte_tokenizer(), [], 1, ["{Who|What} is it?"])
    for opening in openings.conversations(8, piece_share=0.0, question_share=1.0):
        text = byte_tokenizer().decode(list(opening.tokens), skip_special_tokens=False)
        assert text.endswith(("Who is it?<assistant>", "What is it?<assistant>")), text
        assert opening.speaker == ASSISTANT


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
    documents = [Document(np.full(n, n, dtype=np.int32), np.ones(n, dtype=bool)) for n in (9, 20, 35)]
    rows = pack(documents, 8)
    assert rows.tokens.tolist() == [[9] * 8, *[[20] * 8] * 2, *[[35] * 8] * 4, [9, *[20] * 4, *[35] * 3]]
    batches = Batches([rows, pack(documents, 16)], 24, seed=3)
    epoch = [batches.at(step) for step in range(batches.per_epoch)]
    assert sorted(batch.tokens.shape for batch in epoch) == [(1, 16)] * 4 + [(3, 8)] * 2
    again = Batches([rows, pack(documents, 16)], 24, seed=3).at(batches.per_epoch + 1)
    assert again.tokens.tolist() == batches.at(batches.per_epoch + 1).tokens.tolist()


def test_loops_are_not_taught_beyond_their_second_round() -> None:
    loop = [*range(100, 110), *list(range(12)) * 4, 50]
    documents = [Document(np.array(loop, dtype=np.int32), np.ones(len(loop), dtype=bool)) for _ in range(2)]
    for document in without_repeats(documents, 2):
        expected = [True] * (10 + 24 + 7) + [False] * 17 + [True]  # a run ends with its eighth token
        assert document.taught.tolist() == expected
    unsaid = [Document(documents[0].tokens, np.zeros(len(loop), dtype=bool))]
    assert not without_repeats(unsaid, 2)[0].taught.any()


def test_the_draft_vocabulary_is_what_is_taught_most() -> None:
    document = Document(np.array([5, 5, 3, 3, 3, 9, 1, 1, 1, 1]), np.array([True] * 6 + [False] * 4))
    assert frequent([document], 12, 2).tolist() == [3, 5]


def test_int8_storage_rounds_each_row_by_its_own_scale() -> None:
    weight = torch.randn(6, 40) * torch.tensor([1e-3, 0.1, 1, 5, 100, 0])[:, None]
    kept = stored({"x.weight": weight, "norm.weight": weight[0], "d2t": torch.arange(3)}, "int8")
    back = kept["x.weight"].float() * kept["x.weight_scale"]
    assert ((back - weight).abs() <= weight.abs().amax(1, keepdim=True) / 254 + 1e-12).all()
    assert kept["norm.weight"].dtype is torch.float32
    assert kept["d2t"].tolist() == [0, 1, 2]


def test_acceptance_by_hand() -> None:
    found = [2, 9, 9, 0, 1, 9]  # after the pair of a newest token at 1, 2, …; those of 9 are never looked at
    assert acceptance(found, 1, 8, 2) == (3 + 1 + 2, 3)
    assert acceptance(found, 1, 7, 2) == (3 + 1, 2), "a chain that reaches past the end is left out"
    assert acceptance(found, 6, 7, 4) == (0, 0)


def test_the_heads_that_come_with_the_engine_are_whole() -> None:
    """And the normed one is what `speculator: eagle` takes for the model that comes with it."""
    found = {}
    for config in HEADS.glob("*/config.json"):
        fields, weights = read_json(config), HeadWeights(weight_file(config.parent))
        shape = read_shape(fields)
        with closing(weights):
            weights.expect(tensors(shape))
            ids = weights.get("d2t", torch.int64) + torch.arange(shape.draft_vocab)
            assert ids.tolist() == weights.get("t2d", torch.bool).nonzero().flatten().tolist()
        assert weight_file(config.parent).stat().st_size < 15 * 2**20
        found[config.parent.name] = fields
    assert found.keys() == {"smollm2-135m-instruct", "smollm2-135m-instruct-eagle3"}
    (first, *_) = sorted(found)
    assert found[first]["norm_output"]
    assert found[first]["trained_for"] == {
        "architecture": "LlamaForCausalLM",
        "layers": 30,
        "hidden_size": 576,
        "vocab_size": 49152,
    }
