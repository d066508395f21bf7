"""Verifies the invariants of the tree; for tests, and for a doubt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from engine.plugins.kv_caches.radix.tree import Node, Tree


def audit(tree: Tree, users: Iterable[tuple[Node, Node, int]]) -> set[int]:
    """Check the tree against its users: (root, node each stands at, pages above its end).

    Returns:
        The pages in the tree.

    Raises:
        AssertionError: with the invariant that is broken.
    """
    locks: Counter[int] = Counter()
    for root, standing, depth in users:
        path = list(_upward(standing))
        assert path[-1] is root, "a user stands under another root than its own"
        assert sum(len(node.pages) for node in path) == depth, "a user doesn't stand at the end of what it committed"
        locks.update(id(node) for node in path)
    nodes = list(_downward(tree.trunk))
    pages = Counter(page for node in nodes for page in node.pages)
    assert all(count == 1 for count in pages.values()), "a page is in the tree twice"
    for node in nodes:
        _check_node(tree, node, locks[id(node)])
    unlocked = [node for node in nodes if node.pages and not node.locks]
    assert Counter(unlocked) == Counter([*tree.trial, *tree.proven]), "the lists aren't the unlocked nodes"
    assert all(node.proven for node in tree.proven), "a node on trial is listed as proven"
    assert not any(node.proven for node in tree.trial), "a proven node is listed as on trial"
    assert tree.idle_pages == sum(len(node.pages) for node in unlocked), "the count of idle pages is wrong"
    assert tree.proven_pages == sum(len(node.pages) for node in tree.proven), "the count of proven pages is wrong"
    assert tree.proven_pages <= tree.most_proven, "proven nodes have more than their share"
    order = {node: rank for rank, node in enumerate([*tree.trial, *tree.proven])}
    assert all(order[child] < order[node] for node in order for child in node.children.values()), (
        "a parent before its child"
    )
    return set(pages)


def _check_node(tree: Tree, node: Node, locks: int) -> None:
    assert node.parent is not None, "a node below the trunk has no parent"
    assert node.parent.children.get(node.key) is node, "a node hangs under another key than its own"
    assert len(node.run) == len(node.pages) * tree.stride, "a run and its pages differ in length"
    assert node.parent.proven or not node.proven, "a proven node below one on trial"
    assert node.locks == locks, f"a node has {node.locks} locks, of {locks} users"
    if node.parent is tree.trunk:
        assert not node.pages, "a root has pages"
        assert node.children or node.locks, "a root that nothing needs was left"
    else:
        assert node.pages, "an empty node was left"
        assert node.run.startswith(node.key), "a run doesn't start with its key"
        assert len(node.key) == tree.stride, "a key isn't one page"


def _upward(node: Node) -> Iterator[Node]:
    """The node and those above it, up to the root of its salt."""
    while node.parent is not None:
        yield node
        node = node.parent


def _downward(trunk: Node) -> Iterator[Node]:
    """Every node below the trunk."""
    stack = list(trunk.children.values())
    while stack:
        node = stack.pop()
        yield node
        stack += node.children.values()


__all__ = ["audit"]
