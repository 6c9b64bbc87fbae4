import hashlib

from hypothesis import given
from hypothesis import strategies as st

from supervise.store.hash_chain import Tree, leaf

# The tree that Certificate Transparency implementations test themselves with.
RECORDS = [
    "",
    "00",
    "10",
    "2021",
    "3031",
    "40414243",
    "5051525354555657",
    "606162636465666768696a6b6c6d6e6f",
]
ROOTS = [
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
]


def test_the_roots_are_those_of_certificate_transparency():
    """Any RFC 6962 tool computes the same root, at every size."""
    tree = Tree()
    assert tree.root() == hashlib.sha256(b"").hexdigest()

    for record, root in zip(RECORDS, ROOTS, strict=True):
        tree.add(leaf(bytes.fromhex(record)))
        assert tree.root() == root


def recursive(leaves: list[bytes]) -> bytes:
    """MTH of RFC 6962 section 2.1, word for word."""
    if len(leaves) == 1:
        return leaves[0]
    split = 1
    while split * 2 < len(leaves):
        split *= 2
    left, right = recursive(leaves[:split]), recursive(leaves[split:])
    return hashlib.sha256(b"\x01" + left + right).digest()


@given(st.integers(1, 300))
def test_growing_leaf_by_leaf_gives_the_recursive_definition(size):
    """The O(log n) memory of the writer forgets nothing that matters."""
    leaves = [leaf(str(i).encode()) for i in range(size)]
    tree = Tree()
    for digest in leaves:
        tree.add(digest)

    assert tree.root() == recursive(leaves).hex()
    assert tree.size == size
