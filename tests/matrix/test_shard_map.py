"""`jax.shard_map` in a stage: every collective, form and mesh, forward and backward, equal to plain `jax.jit`."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.engine.jit import MpmdFunction, mpmd_jit_with_loop
from jaxpp_flax.engine.tracing.markers import mark_stage_end
from jaxpp_flax.engine.tracing.treduce import treduce
from jaxpp_flax.schedules import GPipe, Schedule, Std1F1B, ZeroBubble
from tests.helpers import slow_but, tree_allclose
from tests.matrix.harness import RTOL

MICROBATCHES, ROWS, DIM = 2, 8, 8
AXES = {"stage": 2, "data": 2, "tensor": 2}
KINDS = [AxisType.Auto, AxisType.Explicit]
# x is (rows, features); the first product's columns and the second one's rows are sharded, as in a tensor-parallel MLP.
SPECS = {"up": P(None, "tensor"), "down": P("tensor", None)}

# A shard's function of a block's parameters and input, given how it is mapped.
Block = Callable[[Any, jax.Array], jax.Array]


def mesh_of(kind: AxisType) -> MpmdMesh:
    devices = np.array(jax.devices()[:8]).reshape(tuple(AXES.values()))
    return MpmdMesh(jax.sharding.Mesh(devices, tuple(AXES), axis_types=(kind,) * 3), "stage")


def parameters() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    shape = (DIM, DIM)
    return [{name: (rng.normal(size=shape) / 3).astype(np.float32) for name in SPECS} for _ in range(2)]


BATCH = np.random.default_rng(1).normal(size=(MICROBATCHES, ROWS, DIM)).astype(np.float32)


def mlp(p: Any, x: jax.Array) -> jax.Array:
    """The partial products of a tensor-parallel MLP; not yet summed over `tensor`."""
    return jnp.tanh(x @ p["up"]) @ p["down"]


def sums(p: Any, x: jax.Array) -> jax.Array:
    """`psum`, `psum_scatter`, `all_gather`, `axis_index`, over either axis."""
    y = jax.lax.psum_scatter(mlp(p, x), "tensor", scatter_dimension=1, tiled=True)
    y = jax.lax.all_gather(y * (1.0 + jax.lax.axis_index("tensor")), "tensor", axis=1, tiled=True)
    mean = jax.lax.pmean(jnp.sum(y, 0), ("data", "tensor"))
    y = y * (2.0 + jax.lax.axis_index("data")) + jnp.sin(mean)
    return x + jax.lax.pmean(y, "tensor")


def moves(p: Any, x: jax.Array) -> jax.Array:
    """`all_to_all`, `ppermute`, and `psum` over the other axis."""
    y = jax.lax.psum(mlp(p, x), "tensor")
    y = y + 0.5 * jnp.tanh(jax.lax.ppermute(y, "data", [(0, 1), (1, 0)]))
    y = jax.lax.all_to_all(y, "data", split_axis=1, concat_axis=0, tiled=True)
    y = y * (1.0 + jax.lax.axis_index("data"))
    return x + jax.lax.all_to_all(y, "data", split_axis=0, concat_axis=1, tiled=True)


def summed(p: Any, x: jax.Array) -> jax.Array:
    return x + jax.lax.psum(mlp(p, x), "tensor")


def mapped(block: Block, mesh: Any = None, **options: Any) -> Block:
    return lambda p, x: jax.shard_map(
        block, mesh=mesh, in_specs=(SPECS, P("data")), out_specs=P("data"), **options
    )(p, x)  # fmt: skip


def local(p: Any, x: jax.Array, mesh: Any = None) -> jax.Array:
    """No collective at all, beside products outside of the shard_map."""
    return jax.shard_map(jnp.tanh, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(x)


def partly_manual(p: Any, x: jax.Array, mesh: Any = None) -> jax.Array:
    """Manual over `tensor` alone: `data` stays with XLA."""
    specs = (SPECS, P())
    return jax.shard_map(summed, mesh=mesh, in_specs=specs, out_specs=P(), axis_names={"tensor"})(p, x)


def in_scan(p: Any, x: jax.Array, mesh: Any = None) -> jax.Array:
    """Twice over the same parameters, recomputed."""
    step = jax.checkpoint(lambda x, _: (0.5 * mapped(moves, mesh)(p, x), None))
    return jax.lax.scan(step, x, None, length=2)[0]


def rematted(p: Any, x: jax.Array, mesh: Any = None) -> jax.Array:
    return jax.checkpoint(mapped(sums, mesh))(p, x)


FORMS: dict[str, Callable[..., jax.Array]] = {
    "sums": lambda p, x, mesh=None: mapped(sums, mesh)(p, x),
    "moves": lambda p, x, mesh=None: mapped(moves, mesh)(p, x),
    "local": local,
    "partly_manual": partly_manual,
    "unchecked": lambda p, x, mesh=None: mapped(moves, mesh, check_vma=False)(p, x),
    "rematted": rematted,
    "in_scan": in_scan,
}
MESHES: dict[str, Callable[[MpmdMesh], Any]] = {
    "context": lambda mesh: None,
    "submesh": lambda mesh: mesh.lowering_mesh(),
    "submesh_of_another_rank": lambda mesh: mesh.unstack[1],
    "abstract_submesh": lambda mesh: mesh.abstract_submesh,
}


def step_of(*stages: Callable[..., jax.Array]) -> Callable[..., Any]:
    """Losses and gradients of two stages; the blocks of the first go in front of the mark."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        x = stages[0](params[0], x)
        x = mark_stage_end(x)
        return jnp.mean(stages[1](params[1], x) ** 2)

    def step(params: Any, batch: Any, schedule: Schedule | None) -> Any:
        return treduce(lambda x: jax.value_and_grad(loss)(params, x), batch, schedule)

    return step


def chained(*blocks: Callable[..., jax.Array], **options: Any) -> Callable[..., jax.Array]:
    def run(p: Any, x: jax.Array) -> jax.Array:
        for block in blocks:
            x = block(p, x, **options)
        return x

    return run


def check(build: Callable[[Any], Any], mesh: MpmdMesh, given: str, *schedules: Schedule) -> MpmdFunction:
    """Compare a step on ranks with plain `jax.jit` on one rank's mesh, to which shard_map is given that mesh."""
    specs = ([SPECS] * 2, P(None, "data"))
    sub = mesh.unstack[0]
    with jax.set_mesh(sub):
        params, batch = jax.tree.map(
            lambda s, x: jax.device_put(x, NamedSharding(sub, s)), specs, (parameters(), BATCH)
        )  # fmt: skip
        expected = jax.tree.map(np.asarray, jax.jit(build(None), static_argnums=2)(params, batch, None))
    pipelined = mpmd_jit_with_loop(build(MESHES[given](mesh)), mesh, in_specs=specs, static_argnums=2)
    for schedule in schedules or (Std1F1B(2),):
        actual = pipelined(parameters(), BATCH, schedule)
        tree_allclose(jax.tree.map(np.asarray, actual), expected, rtol=RTOL)
    return pipelined


@pytest.mark.parametrize("kind", slow_but(KINDS, AxisType.Explicit))
def test_collectives_and_forms(kind: AxisType):
    def build(given: Any) -> Any:
        return step_of(
            chained(FORMS["sums"], FORMS["local"], FORMS["partly_manual"], mesh=given),
            chained(FORMS["unchecked"], FORMS["rematted"], FORMS["in_scan"], mesh=given),
        )

    check(build, mesh_of(kind), "context")


def test_meshes_of_ranks():
    mesh = mesh_of(AxisType.Auto)

    def build(given: Any) -> Any:
        meshes = [None] * 3 if given is None else [given, mesh.unstack[1], mesh.abstract_submesh]
        blocks = [mapped(summed, each) for each in meshes]
        return step_of(chained(blocks[0], blocks[1]), chained(blocks[1], blocks[2]))

    check(build, mesh, "submesh")


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("given", MESHES)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_on_every_mesh(form: str, given: str, kind: AxisType):
    def build(mesh: Any) -> Any:
        return step_of(*[partial(FORMS[form], mesh=mesh)] * 2)

    check(build, mesh_of(kind), given, Std1F1B(2), GPipe(2), ZeroBubble(2))


@pytest.mark.parametrize("kind", slow_but(KINDS, AxisType.Auto))
def test_another_mesh_is_refused(kind: AxisType):
    """That of all ranks, too: on one rank a sum over the ranks' axis would be another number, without a word."""
    mesh = mesh_of(kind)
    beside = r"names a mesh beside that of a stage, \{'stage': 1, 'data': 2, 'tensor': 2\}: .* Leave `mesh=` out"
    whole = r"the shard_map at \S*test_shard_map.py.* is over the whole mesh, \{'stage': 2, .* Leave `mesh=` out"
    meshes = {beside: jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",)), whole: mesh.jax_mesh}
    for message, refused in meshes.items():
        step = step_of(partial(FORMS["local"], mesh=refused), FORMS["local"])
        with pytest.raises(ValueError, match=message):
            mpmd_jit_with_loop(step, mesh, in_specs=([SPECS] * 2, P(None, "data")), static_argnums=2).compile(
                parameters(), BATCH, Std1F1B(2)
            )


@pytest.mark.parametrize(("checked", "wrap"), [(False, lambda f: f), (True, jax.jit)], ids=["unchecked", "call"])
def test_data_parallel_gradients_are_reduced_once(checked: bool, wrap: Callable[..., Any]):
    """Of a block in a shard_map, whose gradient JAX sums in it, and of the dense layers before and behind it.

    Where the block is a call, the sum stands in the call's backward, one level deeper than the shard_map's body.
    """
    mesh = MpmdMesh(jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("stage", "data")), "stage")

    def block(p: Any, x: jax.Array) -> jax.Array:
        x = jnp.tanh(x @ p["up"])
        x = jax.shard_map(
            wrap(lambda p, x: x + jnp.tanh(x @ p["up"])), in_specs=(P(), P("data")), out_specs=P("data"),
            check_vma=checked,
        )({"up": p["down"]}, x)  # fmt: skip
        return x @ p["last"]

    params = [{**p, "last": p["up"][:, ::-1]} for p in parameters()]
    step, specs = step_of(block, block), (P(), P(None, "data"))
    sub = mesh.unstack[0]
    with jax.set_mesh(sub):
        arguments = [jax.device_put(x, NamedSharding(sub, s)) for x, s in zip((params, BATCH), specs, strict=True)]
        expected = jax.tree.map(np.asarray, jax.jit(step, static_argnums=2)(*arguments, None))
    compiled = mpmd_jit_with_loop(step, mesh, in_specs=specs, static_argnums=2).compile(params, BATCH, Std1F1B(2))
    tree_allclose(jax.tree.map(np.asarray, compiled(params, BATCH)), expected, rtol=RTOL)
    tasks = zip(compiled.program.tasks, compiled.executables.tasks, strict=True)
    counts = {task.name: len(_BETWEEN_DEVICES.findall(executable.as_text())) for task, executable in tasks}
    after = sum(counts.pop(name) for name in list(counts) if name.startswith("outer"))
    assert not any(counts.values())
    assert 0 < after <= 6 + 1, "one for each gradient and for the losses, or fewer where XLA combines them"


# With check_vma=False, JAX also sums over the ranks' axis, of size 1: groups of one device, which exchange nothing.
_BETWEEN_DEVICES = re.compile(
    r" all-reduce(?:-start)?\((?!.*replica_groups=(?:\{\{\d+\}|\[\d+,1\]|mesh\[[^]]*\] \{'stage'\}))"
)
