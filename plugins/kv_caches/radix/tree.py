"""The tree of token runs: which pages hold which prefix, which of them are in use, and which to give up first.

A node holds a run of whole pages; nodes below continue it. Token ids are kept as bytes, so that comparing runs is a
memcmp. Each user of the tree stands at the end of a node and locks the path to it. `locks` counts the users at or below
a node.

Unlocked nodes stand in one of two lists, each in the order of their last use: `trial`, whose prefixes were seen once,
and `proven`, whose prefixes were asked for again (a segmented LRU; Karedla, Love, Wherry 1994). Pages are reclaimed
from `trial` first, so what passes by once can't displace what is used again and again. When `proven` has more than its
share of the pages, its oldest nodes go back on trial. A node that comes back soon after it was reclaimed is proven, too
(a ghost list, as in ARC; Megiddo and Modha 2003).

In the order of both lists together a child comes before its parent: leaving a path unlocks it from its end upward, a
child is never used without its parent, and whoever proves a node proves those above it. So the first node is a leaf,
and reclaiming needs no search. It takes pages off the end of that leaf, hence no more than asked.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from engine.plugins.kv_caches.radix.run import Run

GHOSTS: Final = 4096
"""Nodes that are remembered after they were reclaimed."""


@dataclass(slots=True, eq=False)
class Node:
    """One run. The root of a salt has no pages; only the trunk, which holds these roots, has no parent."""

    key: bytes  # what the parent has it under: the run's first page, or the salt
    parent: Node | None
    run: bytearray = field(default_factory=bytearray)
    pages: list[int] = field(default_factory=list)
    children: dict[bytes, Node] = field(default_factory=dict)
    locks: int = 0
    proven: bool = False
    mark: int = 0  # of the way that leads here; another way may have the same, rarely, and no harm is done


class Tree:
    """See the module.

    Args:
        stride: number of bytes that the tokens of one page take.
        most_proven: pages that may stand in `proven`.
    """

    def __init__(self, stride: int, most_proven: int) -> None:
        self.stride, self.most_proven = stride, most_proven
        self.trunk = Node(b"", None, proven=True)
        self.trial: OrderedDict[Node, None] = OrderedDict()
        self.proven: OrderedDict[Node, None] = OrderedDict()
        self.idle_pages = self.proven_pages = 0  # in either list, in the second
        self.returns = 0  # nodes that came back soon after they were reclaimed
        self._ghosts: OrderedDict[int, None] = OrderedDict()  # marks

    def walk(self, node: Node, run: Run) -> Iterator[tuple[Node, int]]:
        """Follow `run` down from `node`: each node entered, and how many of its pages agree, one or more.

        Only the last node may agree in part. The caller may split a node that it was given. Reads no more of the run
        than twice what agrees.
        """
        at = run.first
        while node.children and at < run.last and (child := node.children.get(run.pages(at, at + 1))):
            agree = self._agree(child, run, at)
            whole = agree == len(child.pages)
            yield child, agree
            if not whole:
                return
            at += agree
            node = child

    def enter(self, salt: bytes) -> Node:
        """Lock the root of a salt."""
        root = self.trunk.children.get(salt)
        if root is None:
            root = self.trunk.children[salt] = Node(salt, self.trunk, proven=True, mark=hash(salt))
        root.locks += 1
        return root

    def step(self, child: Node, agree: int) -> Node:
        """Move a user down onto the first `agree` pages of a child of its node, which are proven by that; but not
        those that hang below a run which nobody else has asked for, since the user itself left them there."""
        if agree < len(child.pages):
            child = self._split(child, agree)
        if not child.locks:
            self._list(child).pop(child, None)  # the upper half of a node just cut is not listed, but it is counted
            self._count(child, -len(child.pages))
        child.locks += 1
        assert child.parent is not None, "only nodes with pages are stepped on"
        child.proven = child.parent.proven
        return child

    def grow(self, node: Node, run: bytes, pages: list[int]) -> Node:
        """Continue the run that ends with `node` by one that nothing below starts with; its user moves to the end."""
        if node.pages and node.locks == 1 and not node.children and not node.proven:
            node.run += run
            node.pages += pages
            return node
        key = run[: self.stride]
        mark = hash((node.mark, key))
        child = node.children[key] = Node(key, node, bytearray(run), pages, locks=1, mark=mark)
        if node.proven and mark in self._ghosts:
            del self._ghosts[mark]
            child.proven = True
            self.returns += 1
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
        while (missing := count - len(reclaimed)) > 0:
            leaf = next(iter(self.trial or self.proven))
            keep = max(0, len(leaf.pages) - missing)
            gone = leaf.pages[keep:]
            reclaimed += reversed(gone)
            self._count(leaf, -len(gone))
            del leaf.pages[keep:], leaf.run[keep * self.stride :]
            if not keep:
                del self._list(leaf)[leaf]
                self._remember(leaf)
                self._drop_empty(leaf)
        return reclaimed

    def _agree(self, node: Node, run: Run, at: int) -> int:
        """How many pages of the node's run stand in `run` from page `at` on; the first does."""
        size, agree, ahead = min(len(node.pages), run.last - at), 1, 1
        while agree < size:  # in pieces that double, so that little is read in vain
            stop = min(size, agree + ahead)
            ours, theirs = node.run[agree * self.stride : stop * self.stride], run.pages(at + agree, at + stop)
            if ours != theirs:
                return agree + self._equal_pages(ours, theirs)
            agree, ahead = stop, 2 * ahead
        return agree

    def _equal_pages(self, ours: bytearray, theirs: bytes) -> int:
        at = 0
        while ours[at : at + self.stride] == theirs[at : at + self.stride]:
            at += self.stride
        return at // self.stride

    def _split(self, node: Node, keep: int) -> Node:
        """Cut a node in two; returns the upper one, of `keep` pages. Whoever locks a node locks both halves."""
        cut = keep * self.stride
        upper = Node(
            node.key, node.parent, node.run[:cut], node.pages[:keep],
            locks=node.locks, proven=node.proven, mark=node.mark,
        )  # fmt: skip
        assert node.parent is not None, "only nodes with pages can be cut"
        node.parent.children[node.key] = upper
        del node.run[:cut], node.pages[:keep]
        node.key, node.parent = bytes(node.run[: self.stride]), upper
        node.mark = hash((upper.mark, node.key))
        upper.children[node.key] = node
        return upper

    def _unlock(self, node: Node) -> None:
        node.locks -= 1
        if not node.locks:
            self._list(node)[node] = None
            self._count(node, len(node.pages))
            while self.proven_pages > self.most_proven:
                self._put_on_trial()

    def _put_on_trial(self) -> None:
        """The proven node that was used least recently must prove itself again. Those below it stand on trial."""
        node, _ = self.proven.popitem(last=False)
        self.proven_pages -= len(node.pages)
        node.proven = False
        self.trial[node] = None

    def _list(self, node: Node) -> OrderedDict[Node, None]:
        return self.proven if node.proven else self.trial

    def _count(self, node: Node, pages: int) -> None:
        self.idle_pages += pages
        if node.proven:
            self.proven_pages += pages

    def _remember(self, node: Node) -> None:
        self._ghosts[node.mark] = None
        self._ghosts.move_to_end(node.mark)
        if len(self._ghosts) > GHOSTS:
            self._ghosts.popitem(last=False)

    def _drop_empty(self, node: Node) -> None:
        """Take out a node without pages that nothing needs, and the root above it if that was its last child."""
        while node.parent is not None and not (node.pages or node.children or node.locks):
            del node.parent.children[node.key]
            node = node.parent


__all__ = ["GHOSTS", "Node", "Tree"]
