"""RadixTree: maps the text of conversations to its segments, with one radix tree per session."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from slime_router.segment import Segment

BYTES_PER_CHARACTER: Final = 4
"""Upper bound for a Python string."""
BYTES_PER_TOKEN: Final = 8
BYTES_PER_MARK: Final = 1024
"""Overhead of a marked position: node, segment, arrays, their entries."""


@dataclass(slots=True, eq=False)
class Node:
    """A position in a text: `edge` is the text from the parent to here."""

    edge: str
    parent: Node | None
    session: str
    children: dict[str, Node] = field(default_factory=dict)
    """By the first character of their edges."""
    segment: Segment | None = None
    """Set where a turn ended: the tokens of the whole text up to here, as a chain."""
    used_at: int = -1
    """The newest policy version at its last use."""


@dataclass(frozen=True, slots=True)
class Known:
    """The longest prefix of a text whose tokens are known."""

    length: int
    """Characters."""
    segment: Segment | None


class RadixTree:
    """Marks where turns ended. Sessions are separate, since the same text may have different tokens in two of them; within
    a session the newest tokens count. The least recently used mark is removed when the referenced segments exceed
    `max_bytes`, and a mark is removed when it was not used for `keep_versions` policy versions."""

    def __init__(self, *, max_bytes: int, keep_versions: int) -> None:
        self._max_bytes = max_bytes
        self._keep_versions = keep_versions
        self._roots: dict[str, Node] = {}
        self._marked: OrderedDict[Node, None] = OrderedDict()
        self._version = -1
        self.num_bytes = 0
        self.forgotten = 0

    def __len__(self) -> int:
        return len(self._marked)

    def longest(self, session: str, text: str) -> Known:
        """Walks down the tree as long as whole edges match."""
        node = self._roots.get(session)
        position = 0
        marked: list[Node] = []
        known = Known(0, None)
        while node is not None:
            if node.segment is not None:
                marked.append(node)
                known = Known(position, node.segment)
            node = node.children.get(text[position : position + 1])
            if node is None or not text.startswith(node.edge, position):
                break
            position += len(node.edge)
        # Nodes near the root come last, so that the beginning of a conversation is never removed before its continuation.
        for used in reversed(marked):
            self._use(used)
        return known

    def mark(self, session: str, text: str, segment: Segment, *, num_characters: int) -> None:
        """Marks the end of a turn. `segment`: tokens of `text`, whose last `num_characters` are the segment's own."""
        cost = (
            BYTES_PER_MARK
            + BYTES_PER_TOKEN * len(segment.token_ids)
            + BYTES_PER_CHARACTER * (num_characters + len(session))
        )
        node = self._place(session, text)
        node.segment = segment
        self.num_bytes += cost
        # A segment lives as long as a conversation continues from it: its bytes count until the last reference is gone.
        weakref.finalize(segment, self._release, cost).atexit = False
        self._learn_version(max((span.version for span in segment.spans), default=-1))
        self._use(node)
        self._forget()

    def _learn_version(self, version: int) -> None:
        if self._version < 0 <= version:
            # Before the first response there is no version: such nodes count as of the first one.
            for node in self._marked:
                node.used_at = version
        self._version = max(self._version, version)

    def _release(self, cost: int) -> None:
        self.num_bytes -= cost

    def _use(self, node: Node) -> None:
        node.used_at = self._version
        self._marked[node] = None
        self._marked.move_to_end(node)

    def _place(self, session: str, text: str) -> Node:
        """The node at the end of `text`. Splits the edge that `text` matches only in part."""
        node = self._roots.setdefault(session, Node("", None, session))
        position = 0
        while position < len(text):
            child = node.children.get(text[position])
            if child is None:
                child = node.children[text[position]] = Node(text[position:], node, session)
            elif not text.startswith(child.edge, position):
                child = split(child, common_length(child.edge, text, position))
            node = child
            position += len(node.edge)
        return node

    def _forget(self) -> None:
        oldest_version = self._version - self._keep_versions
        while self._marked:
            node = next(iter(self._marked))
            if self.num_bytes <= self._max_bytes and node.used_at >= oldest_version:
                return
            del self._marked[node]
            node.segment = None
            self.forgotten += 1
            self._prune(node)

    def _prune(self, node: Node) -> None:
        """Removes nodes that are neither marked nor a fork."""
        while node.segment is None and not node.children and node.parent is not None:
            parent = node.parent
            del parent.children[node.edge[0]]
            node = parent
        if node.segment is not None:
            return
        if node.parent is None:
            if not node.children:
                del self._roots[node.session]
        elif len(node.children) == 1:
            (child,) = node.children.values()
            child.edge = node.edge + child.edge
            child.parent = node.parent
            node.parent.children[child.edge[0]] = child


def common_length(edge: str, text: str, position: int) -> int:
    """Length of the common prefix of `edge` and `text[position:]`, by bisection: comparing strings is fast."""
    low, high = 0, min(len(edge), len(text) - position)
    while low < high:
        middle = (low + high + 1) // 2
        if text.startswith(edge[:middle], position):
            low = middle
        else:
            high = middle - 1
    return low


def split(node: Node, length: int) -> Node:
    """A new node after the first `length` characters of the node's edge."""
    assert node.parent is not None
    upper = Node(node.edge[:length], node.parent, node.session)
    node.parent.children[upper.edge[0]] = upper
    node.edge = node.edge[length:]
    node.parent = upper
    upper.children[node.edge[0]] = node
    return upper
