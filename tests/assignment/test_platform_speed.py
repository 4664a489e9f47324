"""Assumed speeds of platforms."""

from jaxpp_flax.assignment.platform_speed import flops_per_byte, hardware_of


def test_an_unknown_platform_counts_as_an_accelerator():
    assert flops_per_byte("new") == flops_per_byte("gpu") > flops_per_byte("cpu")
    assert hardware_of("new") == hardware_of("cuda")
    assert hardware_of("cpu").flops < hardware_of("tpu").flops
