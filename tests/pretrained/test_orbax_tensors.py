"""The leaves of an Orbax checkpoint, read in parts: of this package, and of stock Orbax in either format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxpp_flax.checkpoint import CorruptCheckpointError, save
from jaxpp_flax.pretrained import load_pretrained
from jaxpp_flax.pretrained.orbax_tensors import read_orbax

TREE: dict[str, Any] = {
    "params": {"w": jnp.arange(24.0).reshape(4, 6), "b": [jnp.ones(2, jnp.bfloat16)]},
    "step": jnp.int32(4),
    "opt_state": {"mu": jnp.ones(3)},
    "model_state": {"mean": jnp.ones(2), "key": jnp.zeros(2, jnp.uint32)},
}


def test_a_trainers_checkpoint_has_the_names_of_the_model(tmp_path: Path):
    tensors, optional = read_orbax(save(tmp_path / "run", TREE))
    assert {name: of.shape for name, of in tensors.items()} == {"w": (4, 6), "b.0": (2,), "mean": (2,), "key": (2,)}
    assert optional == {"mean", "key"}
    np.testing.assert_array_equal(tensors["w"].read((slice(2, 4), slice(1, 3))), TREE["params"]["w"][2:4, 1:3])
    loaded = load_pretrained(tmp_path / "run", {"w": np.zeros((4, 6), np.float32), "b": [jnp.zeros(2, jnp.bfloat16)]})
    np.testing.assert_array_equal(loaded["w"], TREE["params"]["w"])
    np.testing.assert_array_equal(loaded["b"][0], TREE["params"]["b"][0])


@pytest.mark.parametrize("options", [{}, {"use_zarr3": True}, {"use_ocdbt": False}], ids=str)
def test_stock_orbax(tmp_path: Path, options: dict[str, bool]):
    handler = ocp.PyTreeCheckpointHandler(**options)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(tmp_path / "stock", args=ocp.args.PyTreeSave({"params": {"w": TREE["params"]["w"]}}))
    tensors, optional = read_orbax(tmp_path / "stock")
    assert not optional
    np.testing.assert_array_equal(tensors["w"].read((slice(1, 3), slice(0, 6))), TREE["params"]["w"][1:3])


def test_damage_is_found_before_anything_is_read(tmp_path: Path):
    path = save(tmp_path / "run", TREE)
    data = max((file for file in path.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(CorruptCheckpointError):
        load_pretrained(path, {"w": np.zeros((4, 6), np.float32)})
