"""Where the state lives: never whole on one device, once the step's place for it is known."""

from __future__ import annotations

import gc
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.checkpoint.format.paths import flatten
from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray, MpmdSharding
from jaxpp_flax.trainers import Precision, Training
from jaxpp_flax.trainers.state.first_values import LeafPrograms
from jaxpp_flax.trainers.state.train_state import is_abstract, shapes_of
from tests.trainers.models import Layers
from tests.trainers.sharing import sharing_steps

STAGES, WIDTH = 2, 64
KERNEL = WIDTH * WIDTH * 4


def loss_fn(model, batch):
    return jnp.mean(model(batch) ** 2)


BATCH = np.ones((4, WIDTH), np.float32)


@sharing_steps("checkpoints")
def make_trainer(tx=None, **options) -> PipelineTrainer:
    options = {"training": Training(ema_decay=0.9), **options}
    options |= {"num_stages": STAGES, "num_microbatches": 2, "logging": False}
    model = Layers(STAGES, WIDTH, use_bias=False)
    return PipelineTrainer(model, tx or optax.adam(1e-2), loss_fn, **options)


def live_bytes(device) -> int:
    """Of all arrays' shards on a device, each buffer once."""
    gc.collect()
    buffers: dict[int, int] = {}
    for array in jax.live_arrays():
        if array.is_deleted() or jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            continue
        for shard in array.addressable_shards:
            if shard.device == device:
                buffers[shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    return sum(buffers.values())


def test_the_default_device_holds_its_own_share_alone():
    device = jax.devices()[0]
    before = live_bytes(device)
    trainer = make_trainer()
    parameters = live_bytes(device) - before
    assert STAGES * KERNEL <= parameters < STAGES * KERNEL + 1000, "the user's parameters; the optimizer's are shapes"
    trainer.compile(BATCH)
    trainer.train_step(BATCH)["loss"].block_until_ready()
    # One stage's kernel, two moments and average; counters, batch and activations are small.
    assert live_bytes(device) - before < 4 * KERNEL + 6000
    assert trainer.state.opt_state[0].mu.layers[STAGES - 1].kernel.get_value().mpmd_idxs == (STAGES - 1,)


def test_a_checkpoint_is_read_straight_onto_the_ranks(tmp_path: Path, monkeypatch):
    first = make_trainer(checkpoints=tmp_path / "run")
    first.fit([BATCH], steps=2)
    first.save()
    device = jax.devices()[0]
    before = live_bytes(device)
    second = make_trainer(checkpoints=tmp_path / "run")
    place, seen = second.held.place, []
    monkeypatch.setattr(second.held, "place", lambda *of: (place(*of), seen.append(live_bytes(device))))
    second.fit([BATCH], steps=3, resume=True)
    # Of the first parameters and the optimizer's state nothing is left: a kernel, its two moments and average.
    assert seen[0] - before < 4 * KERNEL + 6000
    assert second.step == 3
    first.train_step(BATCH)
    np.testing.assert_array_equal(first.train_step(BATCH)["loss"], second.train_step(BATCH)["loss"])


def test_a_resume_that_never_trains_still_gives_the_state(tmp_path: Path):
    first = make_trainer(checkpoints=tmp_path / "run")
    first.fit([BATCH], steps=2)
    first.save()
    second = make_trainer(checkpoints=tmp_path / "run")
    assert second.fit([BATCH], steps=2, resume=True)["loss"] > 0
    assert second.step == 2
    np.testing.assert_array_equal(second.gather_model()(BATCH), first.gather_model()(BATCH))
    np.testing.assert_array_equal(second.predict(BATCH), first.predict(BATCH))
    assert int(second.state.step) == 2


def test_before_the_first_step_the_state_is_whole_for_whoever_asks():
    trainer = make_trainer()
    assert is_abstract(trainer.held.memory.opt_state)
    assert not is_abstract(trainer.state.opt_state)
    trainer.train_step(BATCH)


def test_evaluating_first_needs_no_optimizer():
    trainer = make_trainer(precision=Precision(loss_scale="dynamic"))
    assert trainer.evaluate([BATCH])["loss"] > 0
    trainer.predict(BATCH)
    assert is_abstract(trainer.held.memory.opt_state)


def test_what_depends_on_other_ranks_is_made_all_the_same():
    mesh = MpmdMesh(Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("stage", "fsdp")), "stage")
    on = lambda ranks, *axes: MpmdSharding(mesh, ranks, P(*axes))  # noqa: E731
    values = {"a": jnp.arange(4.0), "b": jnp.arange(6.0)}
    places = {"a": on({0}, "fsdp"), "b": on({1})}
    argument = {
        name: MpmdArray({r: jax.device_put(values[name], s.local_sharding(r)) for r in s.ranks}, s)
        for name, s in places.items()
    }

    def function(tree):
        zeros = jax.tree.map(jnp.zeros_like, tree)
        return {"zeros": zeros, "copy": tree, "sum": tree["a"].sum() + tree["b"].sum(), "count": jnp.int32(3)}

    shardings = {"zeros": places, "copy": places, "sum": on({0, 1}), "count": on({0, 1})}
    found, structure = flatten(shardings)
    computed = LeafPrograms.trace(function, shapes_of(argument)).compute(argument, found)
    made = jax.tree.unflatten(structure, [computed[path] for path in found])
    expected = dict(jax.tree_util.tree_leaves_with_path(function(values)))
    for path, leaf in jax.tree_util.tree_leaves_with_path(made):
        for part in leaf._partially_addressable_arrays.values():
            np.testing.assert_array_equal(np.asarray(part), expected[path])
        assert leaf.dtype == expected[path].dtype
    assert jax.tree.map(lambda leaf: leaf.sharding, made) == shardings
