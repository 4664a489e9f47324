"""Orbax's own checkpointers on trees of `MpmdArray`, and stock Orbax on what this package wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxpp_flax.checkpoint import abstract_state, register, restore, save
from jaxpp_flax.checkpoint.format.paths import flatten
from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray
from tests.checkpoint.layouts import LAYOUTS, make_state
from tests.helpers import tree_allclose
from tests.running import run_python


@pytest.fixture
def registered():
    register()
    register()  # once more changes nothing


def weights(name: str, seed: int = 0):
    return LAYOUTS[name].put(make_state(seed)["params"])


def assert_equal(restored, expected):
    for path, leaf in flatten(restored)[0].items():
        want = flatten(expected)[0][path]
        assert isinstance(leaf, MpmdArray), path
        assert leaf.sharding == want.sharding, path
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(want))


def test_standard_checkpointer(registered, tmp_path: Path):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "x", weights("4 stages x fsdp"))
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "x", weights("2 stages", seed=1))
    assert_equal(restored, weights("2 stages"))


def test_checkpoint_manager(registered, tmp_path: Path):
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        for step in (1, 2):
            manager.save(step, args=ocp.args.StandardSave(weights("4 stages", step)))
        manager.wait_until_finished()
        restored = manager.restore(1, args=ocp.args.StandardRestore(abstract_state(weights("interleaved"))))
    assert_equal(restored, weights("interleaved", 1))
    # and what it wrote is read as any other checkpoint
    assert_equal(restore(tmp_path / "run" / "2", weights("2 stages")), weights("2 stages", 2))


def test_pytree_checkpointer(registered, tmp_path: Path):
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "x", weights("4 stages"))
        target = abstract_state(weights("8 stages"))
        arguments = ocp.checkpoint_utils.construct_restore_args(target)
        restored = checkpointer.restore(tmp_path / "x", item=target, restore_args=arguments)
    assert_equal(restored, weights("8 stages"))


@pytest.mark.parametrize(
    "known",
    [{}, {"dtype": jnp.bfloat16}, {"global_shape": (4, 2)}, {"global_shape": (4, 2), "dtype": jnp.bfloat16}],
    ids=str,
)
def test_what_other_processes_hold_has_its_type_and_is_not_read(
    known: dict[str, Any], registered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (sharding,) = {leaf.sharding for leaf in jax.tree.leaves(weights("2 stages")) if leaf.mpmd_idxs == (1,)}
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "x", {"w": np.ones((4, 2), np.float32)})
        monkeypatch.setattr("jaxpp_flax.checkpoint.format.handler._has_local_devices", lambda sharding: False)
        arguments = {"w": ocp.ArrayRestoreArgs(restore_type=jax.Array, sharding=sharding, **known)}
        leaf = checkpointer.restore(tmp_path / "x", restore_args=arguments)["w"]
    assert (leaf.shape, leaf.dtype) == ((4, 2), known.get("dtype", np.float32))
    assert leaf.sharding == sharding
    assert not leaf._partially_addressable_arrays, "this process has no part of it"


def test_plain_arrays_are_treated_as_before(registered, tmp_path: Path):
    tree = {"x": jnp.arange(3.0), "n": np.ones(2), "key": jax.random.key(1)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "x", tree)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "x", tree)
    tree_allclose(restored, tree, rtol=0, atol=0)
    assert isinstance(restored["x"], jax.Array)


def test_memory_that_a_step_reuses_is_written_as_it_was(registered, tmp_path: Path):
    """An asynchronous save, and at once a donated update of the same buffers."""
    array = LAYOUTS["2 stages"].put({"params": {"embed": jnp.arange(1 << 20, dtype=jnp.float32)}})["params"]["embed"]
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "x", {"x": array})
        for part in array._parts.values():
            for _ in range(5):
                part = add(part)
            part.block_until_ready()
        checkpointer.wait_until_finished()
    assert array.is_deleted()
    restored = restore(tmp_path / "x", {"x": np.zeros(1 << 20, np.float32)})
    np.testing.assert_array_equal(restored["x"], np.arange(1 << 20, dtype=np.float32))


# The tests' own environment may have the package installed: None in `sys.modules` makes every import of it fail.
READER = """
import sys
sys.modules["jaxpp_flax"] = None
import numpy as np, orbax.checkpoint as ocp
with ocp.StandardCheckpointer() as checkpointer:
    tree = checkpointer.restore(sys.argv[1])
print(sorted(tree), sorted(tree["params"]["blocks"]), tree["step"], tree["params"]["embed"].sum())
try:
    import jaxpp_flax.checkpoint
except ImportError:
    pass
else:
    sys.exit("the package could be imported: this run proves nothing")
"""


@pytest.mark.processes
def test_stock_orbax_reads_it_without_this_package(tmp_path: Path):
    state = make_state(2)
    path = save(tmp_path / "ckpt", LAYOUTS["4 stages x fsdp"].put(state))
    (tmp_path / "reader.py").write_text(READER)
    # -I: neither the current directory nor PYTHONPATH; a device count that differs from the writer's is no matter.
    flags = "--xla_force_host_platform_device_count=8"
    done = run_python("-I", str(tmp_path / "reader.py"), str(path), cwd=tmp_path, XLA_FLAGS=flags)
    expected = f"['model_state', 'opt_state', 'params', 'step'] {sorted('01234567')} 5 "
    assert done.stdout.startswith(expected)
    np.testing.assert_allclose(float(done.stdout.split()[-1]), float(state["params"]["embed"].sum()), rtol=1e-5)
