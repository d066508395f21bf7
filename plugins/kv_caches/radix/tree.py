"""The tree of token runs: which pages hold which prefix, which of them are in use, and which to give up first.

A node holds a run of whole pages; nodes below continue it. Token ids are kept as bytes, so that comparing runs is one
memcmp. Each user of the tree stands at the end of a node and locks the path to it. `locks` counts the users at or below
a node.

Unlocked nodes stand in `idle` in the order of their last use, a child always before its parent: leaving a path unlocks
it from its end upward, and a child is never used without its parent. So the first of `idle` is a leaf, the least
recently used one, and reclaiming needs no search. It takes pages off the end of that leaf, hence no more than asked.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Node:
    """One run. The root of a salt has no pages; only the trunk, which holds these roots, has no parent."""

    key: bytes  # what the parent has it under: the run's first page, or the salt
    parent: Node | None
    run: bytearray = field(default_factory=bytearray)
    pages: list[int] = field(default_factory=list)
    children: dict[bytes, Node] = field(default_factory=dict)
    locks: int = 0


class Tree:
    """See the module. `stride` is the number of bytes that the tokens of one page take."""

    def __init__(self, stride: int) -> None:
        self.stride = stride
        self.trunk = Node(b"", None)
        self.idle: OrderedDict[Node, None] = OrderedDict()
        self.idle_pages = 0

    def walk(self, node: Node, run: bytes) -> Iterator[tuple[Node, int]]:
        """Follow `run` (whole pages) down from `node`: each node entered, and how many of its pages agree, one or more.

        Only the last node may agree in part. The caller may split a node that it was given.
        """
        at = 0
        while child := node.children.get(run[at : at + self.stride]):
            agree = self._agree(child, run, at)
            whole = agree == len(child.pages)
            yield child, agree
            if not whole:
                return
            at += agree * self.stride
            node = child

    def enter(self, salt: bytes) -> Node:
        """Lock the root of a salt."""
        root = self.trunk.children.get(salt)
        if root is None:
            root = self.trunk.children[salt] = Node(salt, self.trunk)
        root.locks += 1
        return root

    def step(self, child: Node, agree: int) -> Node:
        """Move a user down onto the first `agree` pages of a child of its node."""
        if agree < len(child.pages):
            child = self._split(child, agree)
        if not child.locks:
            self.idle.pop(child, None)  # the upper half of a node just cut is not listed, but its pages are counted
            self.idle_pages -= len(child.pages)
        child.locks += 1
        return child

    def grow(self, node: Node, run: bytes, pages: list[int]) -> Node:
        """Continue the run that ends with `node` by one that nothing below starts with; its user moves to the end."""
        if node.pages and node.locks == 1 and not node.children:
            node.run += run
            node.pages += pages
            return node
        key = run[: self.stride]
        child = node.children[key] = Node(key, node, bytearray(run), list(pages), locks=1)
        return child

    def rise(self, node: Node, depth: int, target: int) -> Node:
        """Move a user from the end of `node`, `depth` pages below its root, up to `target` pages below it."""
        while depth > target:
            keep = target - (depth - len(node.pages))
            if keep > 0:
                upper = self._split(node, keep)
                self._unlock(node)
                return upper
            depth -= len(node.pages)
            self._unlock(node)
            assert node.parent is not None, "a user rose above its root"
            node = node.parent
        return node

    def leave(self, root: Node) -> None:
        """Unlock the root of a salt; one that nothing hangs on disappears."""
        root.locks -= 1
        self._drop_empty(root)

    def reclaim(self, count: int) -> list[int]:
        """Give up `count` pages of unlocked leaves, the least recently used leaf first, each from its end."""
        reclaimed: list[int] = []
        while len(reclaimed) < count:
            leaf = next(iter(self.idle))
            keep = max(0, len(leaf.pages) - (count - len(reclaimed)))
            reclaimed += reversed(leaf.pages[keep:])
            del leaf.pages[keep:], leaf.run[keep * self.stride :]
            if not keep:
                del self.idle[leaf]
                self._drop_empty(leaf)
        self.idle_pages -= count
        return reclaimed

    def _agree(self, node: Node, run: bytes, at: int) -> int:
        """How many pages of the node's run stand in `run` from byte `at` on."""
        if run.startswith(node.run, at):
            return len(node.pages)
        agree = 1  # the key
        while True:
            here = agree * self.stride
            if node.run[here : here + self.stride] != run[at + here : at + here + self.stride]:
                return agree
            agree += 1

    def _split(self, node: Node, keep: int) -> Node:
        """Cut a node in two; returns the upper one, of `keep` pages. Whoever locks a node locks both halves."""
        cut = keep * self.stride
        upper = Node(node.key, node.parent, node.run[:cut], node.pages[:keep], locks=node.locks)
        assert node.parent is not None, "only nodes with pages can be cut"
        node.parent.children[node.key] = upper
        del node.run[:cut], node.pages[:keep]
        node.key, node.parent = bytes(node.run[: self.stride]), upper
        upper.children[node.key] = node
        return upper

    def _unlock(self, node: Node) -> None:
        node.locks -= 1
        if not node.locks:
            self.idle[node] = None
            self.idle_pages += len(node.pages)

    def _drop_empty(self, node: Node) -> None:
        """Take out a node without pages that nothing needs, and the root above it if that was its last child."""
        while node.parent is not None and not (node.pages or node.children or node.locks):
            del node.parent.children[node.key]
            node = node.parent


__all__ = ["Node", "Tree"]
