"""The root of a growing Merkle tree, in O(log n) memory.

The tree of RFC 6962 section 2.1: leaf = SHA-256(0x00 || record), node = SHA-256(0x01 || left ||
right), split at the largest power of two below the size. A root and its
size prove later that the first `size` records are unchanged.
"""

from __future__ import annotations

import hashlib


def leaf(record: bytes) -> bytes:
    """Return the 32-byte leaf digest of one record."""
    return hashlib.sha256(b"\x00" + record).digest()


def _node(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\x01" + left + right).digest()


class Tree:
    """A tree of leaves added in order.

    Attributes:
        size: number of leaves.
    """

    __slots__ = ("_peaks", "size")

    def __init__(self) -> None:
        self.size = 0
        self._peaks: list[bytes] = []  # roots of full subtrees, largest first

    def add(self, digest: bytes) -> None:
        """Add the next leaf digest."""
        rest = self.size
        while rest & 1:
            digest = _node(self._peaks.pop(), digest)
            rest >>= 1
        self._peaks.append(digest)
        self.size += 1

    def root(self) -> str:
        """Return the root of all leaves so far, 64 hex digits."""
        if not self._peaks:
            return hashlib.sha256(b"").hexdigest()
        digest = self._peaks[-1]
        for left in reversed(self._peaks[:-1]):
            digest = _node(left, digest)
        return digest.hex()
