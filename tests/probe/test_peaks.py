"""What a device can do, by its name."""

import pytest

from supervise_probe.collectors.speed import peak_of


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", None),
        ("NVIDIA A10G", 70e12),
        ("Tesla V100-SXM2-16GB", 125e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("AMD Instinct MI300X", 1307.4e12),
        ("cpu", None),
    ],
)
def test_a_device_is_known_by_its_name(name, peak):
    """A slice or a slower edition has another peak, which nobody told us."""
    assert peak_of(name) == peak
