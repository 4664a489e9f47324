"""Machines that are only described, for tests of the tier `compilers`."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from jax.sharding import Mesh

from jaxpp_flax.planning import described_mesh

# One host, and two.
ONE_HOST = ("tpu-v5e:2x2", "h100-sxm:1x4")
TWO_HOSTS = ("tpu-v5e:2x4", "h100-sxm:2x4")


def mesh_of(machine: str, axes: Mapping[str, int]) -> Mesh:
    """Return a mesh of a machine; skip the test where its compiler is not installed, and say why."""
    try:
        return described_mesh(machine, axes)
    except ModuleNotFoundError as error:
        pytest.skip(str(error))
