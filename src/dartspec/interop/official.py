"""Reads index files of the official DART program (fvliang/DART): `.trie`, little-endian, no magic, no version.

u64 order, u64 node count, then each node: i32 token, u64 parent, i32 frequency, u64 number of children, and a child
table of (i32 token, u64 node), which repeats what the parents say. Node 0 is the root. This reader holds the trie in
memory.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np

from dartspec.errors import DartspecError
from dartspec.ngram import NgramIndex

_HEAD = struct.Struct("<QQ")
_NODE = struct.Struct("<iQiQ")
_CHILD_BYTES = 12
_MAX_ORDER = 5


def import_trie(
    path: str | os.PathLike[str],
    *,
    vocab_size: int,
    fingerprint: str,
    name: str,
    description: str,
    exact: bool = True,
    min_count: int = 1,
) -> NgramIndex:
    """The same counts as an index of ours; raises DartspecError when the file is no such trie.

    The file does not say for which tokenizer it was built: `vocab_size`, `fingerprint` and `name` are the caller's.
    """
    grams, counts = read_trie(path)
    return NgramIndex.from_counts(
        grams,
        counts,
        vocab_size=vocab_size,
        fingerprint=fingerprint,
        name=name,
        description=description,
        exact=exact,
        min_count=min_count,
    )


def read_trie(path: str | os.PathLike[str]) -> tuple[np.ndarray, np.ndarray]:
    """(n, order) int32 grams, padded with -1 behind, and (n,) int64: how many passes end at each, for those with any.

    A node's frequency counts the passes through it; the passes that end there are those that no child has.
    """
    data = Path(path).read_bytes()
    if len(data) < _HEAD.size:
        raise DartspecError(f"trie {path} has {len(data)} bytes, expected at least {_HEAD.size}: it is no trie")
    order, num_nodes = _HEAD.unpack_from(data)
    if not 2 <= order <= _MAX_ORDER:
        raise DartspecError(f"trie {path} has order {order}, expected 2 to {_MAX_ORDER}: it is no trie, or too long")
    if not 1 <= num_nodes <= (len(data) - _HEAD.size) // _NODE.size:
        raise DartspecError(f"trie {path} announces {num_nodes} nodes in {len(data)} bytes: cut off or no trie")
    grams = np.full((num_nodes, order), -1, dtype=np.int32)
    depth = np.zeros(num_nodes, dtype=np.int64)
    frequency = np.zeros(num_nodes, dtype=np.int64)
    parents = np.zeros(num_nodes, dtype=np.int64)
    at = _HEAD.size
    for node in range(num_nodes):
        if at + _NODE.size > len(data):
            raise DartspecError(f"trie {path} ends in node {node} of {num_nodes}: it was cut off")
        token, parent, count, num_children = _NODE.unpack_from(data, at)
        at += _NODE.size + _CHILD_BYTES * num_children
        if node == 0:
            continue
        if parent >= node or depth[parent] >= order or token < 0 or count < 1:
            raise DartspecError(
                f"trie {path}, node {node}: token {token}, parent {parent} and frequency {count} are no trie of "
                f"order {order}"
            )
        parents[node], frequency[node] = parent, count
        grams[node] = grams[parent]
        grams[node, depth[parent]] = token
        depth[node] = depth[parent] + 1
    if at != len(data):
        raise DartspecError(f"trie {path} has {len(data)} bytes, its {num_nodes} nodes take {at}: cut off or damaged")
    ending = frequency.copy()
    np.subtract.at(ending, parents[1:], frequency[1:])
    ending[0] = 0
    if (ending < 0).any():
        node = int(np.argmax(ending < 0))
        raise DartspecError(f"trie {path}, node {node}: its children are counted more often than itself")
    kept = ending > 0
    return grams[kept], ending[kept]
