"""How the rows begin that the target goes on with: a system prompt and a few words of a user, or a piece of a text.

An instruct model that is shown the beginning of a user's turn writes what users ask (the idea of Magpie, arXiv
2406.08464). Left alone it asks much the same each time; first words and topics spread it out.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from engine.errors import ConfigError
from engine.plugins.speculators.eagle.training.questions import Questions
from engine.plugins.speculators.eagle.training.writing import ASSISTANT, Opening, Scripts
from engine.tokenizer import Tokenizer

SYSTEMS: Final = (
    "You are a helpful assistant.",
    "You are an experienced programmer who explains code clearly.",
    "You answer in one or two short sentences.",
    "You are a patient teacher of mathematics.",
    "You are a translator.",
    "You help with writing: letters, stories, summaries.",
    "You are an expert in history and geography.",
    "You always answer with a list.",
)

FIRST_WORDS: Final = (
    "", "", "", "", "What is", "What are", "Why", "How do I", "How does", "Can you", "Please", "Explain", "Describe",
    "Write", "Write a Python function that", "Write a short story about", "Write an email", "Write a poem about",
    "Write a function", "Fix this code:\n\n```python\n", "What does this code do?\n\n```python\n", "Write a SQL query",
    "Write a shell command", "Give me", "Give three examples of", "List five", "List the", "Make a table of",
    "Translate the following sentence into", "Translate to English:", "Translate to French:", "Translate to Spanish:",
    "Summarize the following text:\n\n", "Summarize this in one sentence:\n\n", "Rewrite this sentence", "Correct the",
    "Solve", "Calculate", "If a train", "A shop sells", "Tom has", "What is the sum of", "Compare", "Who", "When did",
    "Where", "Is it true that", "Which", "Tell me about", "I need help with", "My", "Suggest", "Plan", "Create",
    "Generate", "Classify", "Name", "Convert", "Define", "Find the", "Hello", "Hi", "Thanks", "Let's talk about",
    "Answer in JSON:", "Complete the sentence:", "Pretend you are", "What would happen if", "Recommend",
)  # fmt: skip

TOPICS: Final = (
    "a garden", "a lost dog", "a sorting algorithm", "an old friend", "apples", "atoms", "baking bread", "banks",
    "batteries", "bees", "birthdays", "black holes", "bridges", "business", "butterflies", "cats", "cells", "chess",
    "China", "cities", "climate", "clocks", "coffee", "computers", "cooking", "cycling", "dance", "databases",
    "democracy", "dictionaries in Python", "dinosaurs", "dreams", "earthquakes", "economics", "electric cars",
    "elephants", "energy", "exams", "exercise", "family", "farming", "fashion", "files", "films", "fire", "fish",
    "flowers", "football", "France", "fractions", "friendship", "games", "geometry", "glass", "gravity", "health",
    "history", "holidays", "horses", "houses", "India", "insurance", "interviews", "invoices", "islands", "Japan",
    "jobs", "kings and queens", "languages", "law", "leadership", "libraries", "light", "lists", "loops", "love",
    "machines", "maps", "marketing", "mathematics", "medicine", "memory", "money", "mountains", "museums", "music",
    "networks", "news", "numbers", "nutrition", "oceans", "paper", "parents", "philosophy", "phones", "planets",
    "plants", "poetry", "probability", "projects", "proteins", "rain", "recipes", "regular expressions", "religion",
    "rivers", "robots", "Rome", "sailing", "schools", "sharks", "shopping", "sleep", "snow", "software", "space travel",
    "sports", "statistics", "stories", "strings", "students", "stars", "swimming", "taxes", "tea", "teachers", "teams",
    "telephones", "tennis", "testing", "the brain", "the internet", "the moon", "the sun", "time", "tools", "towns",
    "trains", "travel", "trees", "triangles", "universities", "vegetables", "volcanoes", "war and peace", "water",
    "weather", "websites", "whales", "wind", "wine", "winter", "words", "work", "writing", "zoos",
)  # fmt: skip

SENTENCES: Final = (
    "The shop is closed on Sundays.", "I have lost my keys.", "We are going to the market tomorrow.",
    "She reads a book every week.", "The weather will be better next month.", "My brother works in a hospital.",
    "Where can I buy a ticket?", "The cat sleeps on the old chair.", "They moved to a bigger house last year.",
    "He drinks tea with milk.", "The train was two hours late.", "Please close the window.", "I don't like loud music.",
    "Our teacher speaks four languages.", "The river is very deep here.", "Can you help me with my homework?",
    "The soup needs more salt.", "Winter is my favourite season.", "The meeting starts at half past three.",
    "You should see a doctor.", "The bridge was built a hundred years ago.", "How much does this coat cost?",
    "I am learning to play the piano.", "The bus stops in front of the school.", "Thank you for your letter.",
    "Dogs are not allowed in the park.", "It rained all night.", "My grandmother makes the best bread.",
    "Let's meet at the station.", "The film was too long, but I liked it.", "She forgot her umbrella at the office.",
    "There are many stars tonight.", "We need a new computer.", "The boy runs faster than his sister.",
)  # fmt: skip

ODD: Final = 0.15
"""Share of questions with a system prompt of their own."""

TASKS: Final = (
    "Summarize the following text.", "What is this text about?", "List the main points of the following text.",
    "Explain the following in simple words.", "Write a title for the following text, then a short summary.",
    "What questions does this text answer?", "Continue the following text.", "Rewrite the end of this text.",
)  # fmt: skip

_MARKS: Final = ("FIRSTMARK", "SECONDMARK", "THIRDMARK")


class Openings:
    """Draws openings for the chat template of one model; without a template only pieces of text.

    Args:
        texts: what documents and pieces are cut from.
        seed: the same seed draws the same openings.
        questions: patterns of questions, see `Questions`.
    """

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[str], seed: int, questions: Sequence[str] = ()) -> None:
        self._tokenizer, self._texts = tokenizer, [text for text in texts if text.strip()]
        self._random = random.Random(seed)
        lists = {"topic": TOPICS, "sentence": SENTENCES}
        self._questions = Questions(questions, lists, texts, self._random) if questions else None
        self._around: dict[str | None, tuple[str, str, str]] = {}  # by system prompt; rendering takes a while
        self.chats = tokenizer.has_chat_template

    def conversations(self, count: int, piece_share: float, question_share: float = 0.0) -> list[Opening]:
        """Beginnings of a user's turn or whole questions; among them a share of pieces of text, which have no turns."""
        if not self.chats:
            self._need_texts("the target has no chat template")
        share = (piece_share if self._texts else 0.0) if self.chats else 1.0
        return [self._piece() if self._random.random() < share else self._chat(question_share) for _ in range(count)]

    def documents(self, count: int, length: int) -> list[Opening]:
        """Long texts of a fifth of `length` to `length` tokens, each with a task that the assistant is about to do."""
        self._need_texts("data.documents.rows is set")
        if not self.chats:
            return [self._piece(length) for _ in range(count)]
        return [self._document(self._random.randint(length // 5, length)) for _ in range(count)]

    def _chat(self, question_share: float) -> Opening:
        if self._questions is not None and self._random.random() < question_share:
            return self._question(self._questions)
        return self._conversation()

    def _question(self, questions: Questions) -> Opening:
        system = self._random.choice(SYSTEMS) if self._random.random() < ODD else None
        before, after, *_ = self._between(system)
        return Opening(tokens=self._tokenizer.encode(before + questions.draw() + after), speaker=ASSISTANT)

    def _conversation(self) -> Opening:
        system = None if self._random.random() < 0.5 else self._random.choice(SYSTEMS)
        words = self._random.choice(FIRST_WORDS)
        if words[-1:].isalpha() and self._random.random() < 0.4:
            words += " " + self._random.choice(TOPICS)
        before, *_ = self._between(system)
        return Opening(tokens=self._tokenizer.encode(before + words))

    def _between(self, system: str | None) -> tuple[str, str, str]:
        if system not in self._around:
            self._around[system] = between_turns(self._tokenizer, system)
        return self._around[system]

    def _document(self, length: int) -> Opening:
        before, after, *_ = self._between(None)
        task = self._random.choice(TASKS)
        head, tail = self._tokenizer.encode(f"{before}{task}\n\n"), self._tokenizer.encode(after)
        body = self._tokens(max(1, length - len(head) - len(tail)))
        return Opening(tokens=[*head, *body, *tail], speaker=ASSISTANT)

    def _piece(self, longest: int = 200) -> Opening:
        return Opening(tokens=self._tokens(self._random.randint(2, longest)), speaker=ASSISTANT, turns=False)

    def _need_texts(self, why: str) -> None:
        if not self._texts:
            raise ConfigError(f"{why}, so name files with text in data.texts")

    def _tokens(self, count: int) -> list[int]:
        """So many tokens of the texts, from a random place on."""
        found: list[int] = []
        while len(found) < count:
            text = self._random.choice(self._texts)
            at = self._random.randrange(len(text))
            found += self._tokenizer.encode(text[at : at + 5 * count])
        return found[:count]


def scripts_of(tokenizer: Tokenizer) -> Scripts:
    """The words between turns, read off the chat template; without one the model is never made to change roles."""
    ends = tokenizer.eos_token_ids
    if not tokenizer.has_chat_template:
        return Scripts(after=((0,), (0,)), ends=ends)
    _, after_user, after_assistant = between_turns(tokenizer, None)
    return Scripts(after=(tokenizer.encode(after_user), tokenizer.encode(after_assistant)), ends=ends)


def between_turns(tokenizer: Tokenizer, system: str | None) -> tuple[str, str, str]:
    """What the template writes before the user's words, after them, and after the assistant's."""
    messages = [
        {"role": role, "content": mark} for role, mark in zip(("user", "assistant", "user"), _MARKS, strict=True)
    ]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    rest, parts = tokenizer.apply_chat_template(messages, add_generation_prompt=False), []
    for mark in _MARKS:
        part, found, rest = rest.partition(mark)
        if not found:
            raise ConfigError("the chat template of the target drops messages, so it can't be made to write both sides")
        parts.append(part)
    return parts[0], parts[1], parts[2]


def read_texts(key: str, patterns: Sequence[str]) -> list[str]:
    """The files that absolute or relative glob patterns name; they stand at `key` of the configuration.

    Raises:
        ConfigError: a pattern names no file.
    """
    texts = []
    for pattern in patterns:
        found = sorted(path for path in _matching(pattern) if path.is_file())
        if not found:
            raise ConfigError(f"{key}: no file matches {pattern}")
        texts += [path.read_text(encoding="utf-8", errors="ignore") for path in found]
    return texts


def _matching(pattern: str) -> Iterator[Path]:
    path = Path(pattern)
    root = Path(path.anchor) if path.is_absolute() else Path()
    return root.glob(str(path.relative_to(path.anchor) if path.is_absolute() else path))


__all__ = ["Openings", "read_texts", "scripts_of"]
