"""Random traffic for KV caches, against a model that is too simple to be wrong.

The model knows what was written to each page (the whole prefix up to its end, with the salt) and which page was the
first to be committed for each prefix and has not been given to anybody else since. A match must lead to pages that hold
exactly the prefix asked for, and must be as long as the model knows one to be there.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.specs.kv_cache import KVCache

Prefix = tuple[str, tuple[int, ...]]  # salt, tokens from the first on

TAILS = st.lists(st.integers(0, 1), max_size=8)
SALTS = st.sampled_from(["", "", "salt"])


@dataclass
class Open:
    """An open request as the model sees it."""

    salt: str
    tokens: list[int]
    pages: list[int] = field(default_factory=list)
    computed: int = 0  # tokens written
    committed: int = 0  # pages


class KVCacheMachine(RuleBasedStateMachine):
    """Opens, computes, commits, trims and closes requests of few distinct tokens, so that much is shared."""

    def __init__(self, cache: KVCache, page_size: int, prefix_closed: bool, reuses: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cache, self.size, self.prefix_closed, self.reuses = cache, page_size, prefix_closed, reuses
        self.requests: dict[str, Open] = {}
        self.content: dict[int, Prefix] = {}
        self.resident: dict[Prefix, int] = {}
        self.seen: list[list[int]] = [[]]
        self.evicted = self.count = 0

    def prefix(self, salt: str, tokens: list[int], pages: int) -> Prefix:
        """What the last of the first `pages` pages holds."""
        return salt, tuple(tokens[: pages * self.size])

    def pick(self, data: st.DataObject) -> tuple[str, Open]:
        """One of the open requests."""
        name = data.draw(st.sampled_from(sorted(self.requests)), label="request")
        return name, self.requests[name]

    def sequence(self, data: st.DataObject) -> list[int]:
        """A sequence that starts like one seen before."""
        base = data.draw(st.sampled_from(self.seen), label="base")
        keep = data.draw(st.integers(0, len(base)), label="kept of it")
        tokens = [*base[:keep], *data.draw(TAILS, label="tail")]
        self.seen.append(tokens)
        return tokens

    def verify_match(self, salt: str, tokens: list[int], pages: list[int], num_tokens: int) -> None:
        """Right pages, and as many as there are."""
        assert num_tokens == len(pages) * self.size
        assert num_tokens < max(1, len(tokens))
        for index, page in enumerate(pages):
            assert self.content.get(page) == self.prefix(salt, tokens, index + 1), f"page {page} holds another prefix"
        longest = 0
        while (longest + 1) * self.size < len(tokens) and self.prefix(salt, tokens, longest + 1) in self.resident:
            longest += 1
        assert len(pages) >= longest, f"{longest} pages of the prefix are resident, {len(pages)} were matched"

    @rule(data=st.data(), salt=SALTS)
    def match(self, data: st.DataObject, salt: str) -> None:
        """Look, which changes nothing."""
        tokens, before = self.sequence(data), self.cache.stats()
        self.verify_match(salt, tokens, *self.cache.match(tokens, salt))
        assert self.cache.stats() == before

    @precondition(lambda self: len(self.requests) < 4)
    @rule(data=st.data(), salt=SALTS)
    def open(self, data: st.DataObject, salt: str) -> None:
        """Begin a request."""
        self.begin(self.sequence(data), salt)

    @rule(data=st.data(), salt=SALTS)
    def serve(self, data: st.DataObject, salt: str) -> None:
        """A whole request at once, as far as there is room for it."""
        tokens = self.sequence(data)
        name = self.begin(tokens, salt)
        if self.compute(name, tokens, len(tokens)):
            self.publish(name, len(tokens))
        self.end(name)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), more=TAILS, commit=st.booleans())
    def step(self, data: st.DataObject, more: list[int], commit: bool) -> None:
        """A forward pass over some further tokens, committed at once or later."""
        name, request = self.pick(data)
        tokens = [*request.tokens, *more]
        target = data.draw(st.integers(request.computed, len(tokens)), label="tokens")
        if self.compute(name, tokens, target) and commit:
            self.publish(name, target)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        """Tell the cache of some or all of what was computed."""
        name, request = self.pick(data)
        done = min(request.committed * self.size, request.computed)
        self.publish(name, data.draw(st.integers(done, request.computed), label="computed"))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def trim(self, data: st.DataObject) -> None:
        """Go back: rejected drafts, or further."""
        name, request = self.pick(data)
        keep = data.draw(st.integers(0, len(request.pages) * self.size), label="tokens kept")
        self.cache.trim(name, keep)
        pages = -(-keep // self.size)
        del request.pages[pages:]
        request.committed = min(request.committed, pages)
        floor = request.committed * self.size
        request.computed = max(floor, min(request.computed, keep))
        del request.tokens[max(floor, keep) :]

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        """End a request."""
        self.end(self.pick(data)[0])

    @precondition(lambda self: self.count % 8 == 7)
    @rule()
    def reset(self) -> None:
        """Forget what no request uses. A prefix of which a request has a copy of its own may go or stay."""
        cached = self.cache.stats().cached
        assert self.cache.reset() == cached
        assert self.cache.stats().cached == 0
        held = self.held()
        self.resident = {prefix: page for prefix, page in self.resident.items() if page in held}

    def begin(self, tokens: list[int], salt: str) -> str:
        """Open a request; returns its name."""
        self.count += 1
        name = f"r{self.count}"
        looked = self.cache.match(tokens, salt)
        found = self.cache.open(name, tokens, salt)
        assert found == looked
        assert self.reuses or not found.pages, "pages were matched by a cache that doesn't claim to reuse any"
        self.verify_match(salt, tokens, *found)
        self.requests[name] = Open(salt, list(tokens), list(found.pages), found.num_tokens, len(found.pages))
        return name

    def compute(self, name: str, tokens: list[int], target: int) -> bool:
        """Allocate, and write tokens[:target]; False if there is no room."""
        request = self.requests[name]
        missing = max(0, -(-target // self.size) - len(request.pages))
        before = self.cache.stats()
        fits = missing <= self.cache.available()
        assert self.cache.allocate(name, target) is fits
        if not fits:
            assert self.cache.stats() == before
            return False
        table = self.cache.block_table(name)
        fresh = table[len(request.pages) :]
        assert table[: len(request.pages)] == request.pages
        assert len(fresh) == missing
        assert not self.held() & set(fresh), "a page in use was handed out"
        for page in fresh:
            self.forget(page)
        self.evicted += max(0, missing - before.free)
        request.tokens, request.pages = tokens, list(table)
        self.seen.append(list(tokens))
        for index in range(request.computed // self.size, target // self.size):
            self.content[table[index]] = self.prefix(request.salt, tokens, index + 1)
        request.computed = max(target, request.computed)
        return True

    def publish(self, name: str, computed: int) -> None:
        """Commit a request up to some token."""
        request = self.requests[name]
        self.cache.commit(name, request.tokens, computed)
        for index in range(request.committed, computed // self.size if self.reuses else 0):
            self.resident.setdefault(self.prefix(request.salt, request.tokens, index + 1), request.pages[index])
        request.committed = max(request.committed, computed // self.size)

    def end(self, name: str) -> None:
        """Close a request."""
        self.cache.close(name)
        del self.requests[name]

    def forget(self, page: int) -> None:
        """A page holds nothing any more."""
        self.content.pop(page, None)
        self.resident = {prefix: owner for prefix, owner in self.resident.items() if owner != page}

    def held(self) -> set[int]:
        """Pages in block tables."""
        return {page for request in self.requests.values() for page in request.pages}

    @invariant()
    def pages_are_conserved(self) -> None:
        """Free, cached and held make up the pool, and the cache's own books agree."""
        self.cache.check()
        stats = self.cache.stats()
        assert stats.free + stats.cached + stats.held == stats.pages
        assert self.cache.available() == stats.free + stats.cached
        assert stats.evicted_pages == self.evicted
        held, residents = self.held(), set(self.resident.values())
        assert len(held) <= stats.held <= len(held) + len(held - residents)
        if not self.requests:
            assert stats.held == 0

    @invariant()
    def tables_are_what_they_were(self) -> None:
        """Nothing but the request's own growth and trimming changes its table."""
        for name, request in self.requests.items():
            assert self.cache.block_table(name) == request.pages

    @invariant()
    def whatever_is_cached_can_be_matched(self) -> None:
        """Where eviction takes ends first, every resident prefix can be reached."""
        if self.prefix_closed:
            for salt, tokens in self.resident:
                assert self.cache.match([*tokens, 0], salt).num_tokens == len(tokens)

    def teardown(self) -> None:
        """Close everything: all pages are free or cached."""
        for name in list(self.requests):
            self.cache.close(name)
        self.cache.check()
        stats = self.cache.stats()
        assert stats.free + stats.cached == stats.pages


__all__ = ["KVCacheMachine"]
