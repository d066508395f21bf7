"""Which engine a request goes to: the one that knows its beginning, unless it is much busier."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from engine.server.router.prefixes import Seen, chain, prompt_text
from engine.server.router.worker import Chooser, Standing, Worker


def worker(url: str, **fields: int) -> Worker:
    return Worker(url=url, role="decode", seen=Seen(1000), standing=Standing.READY, **fields)


def blocks(text: bytes, owner: bytes = b"") -> tuple[bytes, ...]:
    return chain(text, 4, owner)


def test_the_engine_that_has_seen_the_beginning_is_chosen() -> None:
    chooser, first, second = Chooser(slack=2), worker("a"), worker("b")
    second.seen.add(blocks(b"once upon a time"))
    longer = blocks(b"once upon a time there was")
    assert chooser.choose([first, second], longer) is second
    second.active = 2
    assert chooser.choose([first, second], longer) is second
    second.active = 3
    assert chooser.choose([first, second], longer) is first
    assert chooser.choose([second], longer) is second
    assert chooser.choose([], longer) is None


def test_without_a_common_beginning_the_least_busy_is_chosen_and_equals_take_turns() -> None:
    chooser, several = Chooser(slack=4), [worker("a", active=1), worker("b"), worker("c")]
    taken = [chooser.choose(several, blocks(b"x" * 20)) for _ in range(4)]
    assert [one.url for one in taken if one] == ["b", "c", "b", "c"]
    several[0].load = {"running": 0, "waiting": 9}
    several[1].load = {"running": 3, "waiting": None}
    assert [one.pressure for one in several] == [9, 3, 0]


def test_one_owner_does_not_find_the_prompts_of_another() -> None:
    seen = Seen(1000)
    seen.add(blocks(b"a secret of mine", b"alice"))
    assert seen.matched(blocks(b"a secret of mine", b"alice")) == 4
    assert seen.matched(blocks(b"a secret of mine", b"bob")) == 0


def test_the_end_of_prompts_is_forgotten_before_their_beginning() -> None:
    seen = Seen(5)
    seen.add(blocks(b"aaaabbbbcccc"))
    seen.add(blocks(b"ddddeeeeffff"))
    assert seen.matched(blocks(b"ddddeeeeffff")) == 3
    assert seen.matched(blocks(b"aaaabbbbcccc")) == 2
    seen.clear()
    assert seen.matched(blocks(b"ddddeeeeffff")) == 0


@given(st.binary(max_size=60), st.binary(max_size=60), st.binary(max_size=60))
def test_as_many_blocks_match_as_are_equal(common: bytes, one: bytes, two: bytes) -> None:
    seen = Seen(1000)
    seen.add(blocks(common + one))
    a, b = common + one, common + two
    equal = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert seen.matched(blocks(b)) == min(equal // 4, len(b) // 4)


def test_a_longer_conversation_begins_with_the_shorter_one() -> None:
    words = [{"role": "user", "content": str(random.random())} for _ in range(5)]
    short, long = ({"messages": words[:count], "temperature": count, "system": "be brief"} for count in (3, 5))
    assert prompt_text(long).startswith(prompt_text(short)[:-2])
    assert prompt_text({"prompt": [1, 2]}) != prompt_text({"prompt": [1, 3]})
    assert prompt_text({"model": "m"}) == b"[]"
