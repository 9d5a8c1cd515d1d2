"""The table of the devices' peaks."""

import pytest

from isogpt.hardware import data_sheet_peak


@pytest.mark.parametrize(
    "name, tflops",
    [
        ("NVIDIA L4", 121),
        ("NVIDIA L40", 181),
        ("NVIDIA L40S", 362),
        ("NVIDIA A10", 125),
        ("NVIDIA A10G", 70),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA RTX A6000", 155),
        ("NVIDIA GeForce RTX 4090", 165),
        ("NVIDIA GeForce RTX 3090", 71),
        ("Tesla V100-SXM2-16GB", 125),
        ("Tesla T4", 65),
        ("NVIDIA T400", None),
        ("NVIDIA A1000", None),
        ("NVIDIA GB2000", None),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_peak_of_a_device(name, tflops):
    """Names are compared as whole words: an L40 is not an L4, an A10G not an A10, an H100 NVL not an H100 SXM."""
    assert data_sheet_peak(name) == (tflops and tflops * 1e12)
