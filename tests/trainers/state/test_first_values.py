"""The program of a model's construction: the eager values, leaf by leaf, with the same bits in every place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.nn import initializers as init
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpp_flax.checkpoint.format.paths import flatten
from jaxpp_flax.engine.arrays import device_memory
from jaxpp_flax.engine.arrays.mesh import MpmdMesh, MpmdSharding
from jaxpp_flax.trainers.state import first_values
from jaxpp_flax.trainers.state.first_values import LeafPrograms

SHAPE = (80, 16)  # larger than what is computed once for all leaves
OTHER = (80, 24)  # compiled by one test alone
RULES = {
    "normal": init.normal(0.02),
    "uniform": init.uniform(0.1),
    "truncated": init.truncated_normal(0.02),
    "orthogonal": init.orthogonal(),  # not element by element
    "zeros": init.zeros,
    "bfloat16": lambda key, shape: init.normal(0.5)(key, shape, jnp.bfloat16),
    "scaled": lambda key, shape: 1.0 + 0.3 * jax.random.normal(key, shape) / 0.7,
    "softplus": lambda key, shape: jax.nn.relu(jax.random.normal(key, shape)) * 1.7,
    "mean": lambda key, shape: (x := jax.random.normal(key, shape)) / jnp.sqrt((x * x).mean()),
    "table": lambda key, shape: jnp.asarray(np.linspace(0, 1, shape[0] * shape[1], dtype=np.float32).reshape(shape)),
}


QUICK = ("uniform", "truncated", "orthogonal", "bfloat16", "mean", "table")  # a rule of each kind


def construct(shape: tuple[int, int], names: Iterable[str]) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(7), len(RULES))
    made = {name: RULES[name](key, shape) for key, name in zip(keys, names, strict=False)}
    parts = jnp.split(jax.random.normal(keys[0], (3 * shape[0], shape[1])) * 0.3, 3)  # of one large value
    return {**made, "parts": parts, "key": keys[0], "twice": made["uniform"], "count": jnp.uint32(3)}


MESH = MpmdMesh(Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("stage", "tensor")), "stage")


def make(traced: LeafPrograms, places: Any = None) -> Any:
    shapes, structure = flatten(traced.shapes)
    made = traced.compute((), dict.fromkeys(shapes) if places is None else flatten(places)[0], whole=True)
    return jax.tree.unflatten(structure, made.values())


def as_numpy(leaf: Any) -> np.ndarray:
    if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return np.asarray(leaf)
    return np.asarray(jax.random.key_data(leaf if isinstance(leaf, jax.Array) else leaf.first_mpmd_replica))


def check(made: Any, expected: Any, rtol: float = 1e-6) -> None:
    for (path, leaf), right in zip(jax.tree_util.tree_leaves_with_path(made), jax.tree.leaves(expected), strict=True):
        assert leaf.dtype == right.dtype
        found, wanted = (as_numpy(each).astype(np.float64) for each in (leaf, right))
        np.testing.assert_allclose(found, wanted, rtol=rtol, atol=rtol * abs(wanted).max(), err_msg=str(path))


def shardings(tree: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    found = [
        MpmdSharding(MESH, {i % 2} if leaf.ndim else {0, 1}, P(None, "tensor") if leaf.ndim == 2 else P())
        for i, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(structure, found)


# XLA fuses operations only when it compiles as for users, and fusions are what could change bits.
@pytest.mark.parametrize(
    ("shape", "names"),
    [
        pytest.param(SHAPE, QUICK, id="quickly"),
        pytest.param(OTHER, tuple(RULES), id="as for users", marks=[pytest.mark.slow, pytest.mark.full_compilation]),
    ],
)
def test_values_are_the_eager_ones_and_divided_ones_have_their_bits(shape: tuple[int, int], names: tuple[str, ...]):
    traced = LeafPrograms.trace(lambda: construct(shape, names))
    whole, places = make(traced), shardings(traced.shapes)
    check(whole, construct(shape, names), rtol=1e-6)
    made = make(traced, places)
    check(made, whole, rtol=0)
    assert jax.tree.map(lambda leaf: leaf.sharding, made) == places
    part = made["uniform"].first_mpmd_replica
    assert part.addressable_shards[0].data.shape == (shape[0], shape[1] // 2)


def test_a_leaf_larger_than_a_device_is_made_in_parts(monkeypatch: pytest.MonkeyPatch):
    """What no device could hold whole; XLA may round a program for parts otherwise."""
    traced = LeafPrograms.trace(lambda: construct(SHAPE, QUICK))
    whole, places, shapes = make(traced), shardings(traced.shapes), list[tuple[int, ...]]()
    call = first_values._Program.__call__

    def noted(self: Any, inputs: Any, sharding: Any) -> Any:
        value = call(self, inputs, sharding)
        shapes.extend(shard.data.shape for shard in value.addressable_shards)
        return value

    monkeypatch.setattr(first_values._Program, "__call__", noted)
    monkeypatch.setattr(device_memory, "free_bytes", lambda device: 0)
    made = make(traced, places)
    check(made, whole, rtol=1e-6)
    assert jax.tree.map(lambda leaf: leaf.sharding, made) == places
    assert {shape for shape in shapes if len(shape) == 2} == {(SHAPE[0], SHAPE[1] // 2)}


def test_only_what_a_leaf_needs_is_computed(monkeypatch: pytest.MonkeyPatch):
    traced = LeafPrograms.trace(lambda: {"a": jnp.sin(jnp.arange(3e3)), "b": jnp.cos(jnp.arange(3e3))})
    ran: list[Any] = []
    run = type(traced.graph).run
    monkeypatch.setattr(type(traced.graph), "run", lambda self, *of: (ran.append(self), run(self, *of))[1])
    monkeypatch.setattr(MpmdMesh, "is_local", lambda self, rank: rank == 1)
    places = {"a": MpmdSharding(MESH, {0}, P()), "b": MpmdSharding(MESH, {1}, P())}
    made = make(traced, places)
    computed = {equation.name for graph in ran for equation in graph.equations}
    assert {"cos", "sin"} & computed == {"cos"}
    assert not made["a"]._partially_addressable_arrays


def test_equal_leaves_are_compiled_once(monkeypatch: pytest.MonkeyPatch):
    def construct() -> Any:
        keys = nnx.Rngs(0)  # each key depends on the count of those before
        return {i: jax.random.normal(keys.params(), SHAPE) * (0.1 + i) for i in range(4)}

    traced = LeafPrograms.trace(construct)
    ran: list[Any] = []
    run = type(traced.graph).run
    monkeypatch.setattr(type(traced.graph), "run", lambda self, *of: (ran.append(self), run(self, *of))[1])
    check(make(traced), construct())
    assert len(ran) == 1


def test_one_call_that_makes_everything_gives_one_leaf_at_a_time():
    @jax.jit
    def everything(key: jax.Array) -> dict[str, jax.Array]:
        return {f"layer_{i}": jax.random.normal(jax.random.fold_in(key, i), (512, 512)) for i in range(3)}

    traced = LeafPrograms.trace(lambda: everything(jax.random.key(0)))
    live: list[int] = []
    for _, program in traced._programs(traced.shapes):
        value = program({}, None)
        live.append(sum(array.nbytes for array in jax.live_arrays() if array.shape == (512, 512)))
        check(value, everything(jax.random.key(0))[f"layer_{len(live) - 1}"])
        del value
    assert max(live) <= 1 << 20, "this leaf alone"


def test_streams_of_another_generator():
    def construct() -> Any:
        return {"w": jax.random.normal(jax.random.key(0, impl="rbg"), SHAPE)}

    traced = LeafPrograms.trace(construct)
    check(make(traced, shardings(traced.shapes)), construct())


def test_stacked_layers():
    def construct() -> Any:
        @nnx.split_rngs(splits=3)
        @nnx.vmap
        def layers(rngs: nnx.Rngs) -> nnx.Module:
            return nnx.Linear(40, 40, rngs=rngs)

        return nnx.state(layers(nnx.Rngs(0)), nnx.Param)

    check(make(LeafPrograms.trace(construct)), construct())
