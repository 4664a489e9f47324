"""Peaks by the kind of a device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from jaxpp_flax.trainers.metrics.utilization import peak_flops


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40", None),
        ("TPU v5 lite", 197e12),
        ("TPU v5", 459e12),
        ("cpu", None),
    ],
)
def test_the_kind_of_a_device(kind, peak):
    assert peak_flops([SimpleNamespace(device_kind=kind)]) == peak


def test_devices_of_several_kinds_add_up_and_unknown_ones_are_not_left_out():
    known, other = SimpleNamespace(device_kind="TPU v4"), SimpleNamespace(device_kind="cpu")
    assert peak_flops([known] * 3) == 3 * 275e12
    assert peak_flops([known, other]) is None
