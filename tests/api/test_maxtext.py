"""A program of MaxText's form, as NVIDIA's fork for JaxPP writes it.

The model is a Linen decoder whose parameters have logical axes. The step maps the gradient over "data" by `vmap`, keeps
the optimizer's state sharded over the same axis (ZeRO), clips by the norm over all ranks, and returns a state and a
dictionary of metrics. The set-up traces the step first, to learn where each leaf of the state belongs, and makes the
state there.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training import train_state
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpp_flax.api as jaxpp
from tests.helpers import tree_allclose

AXES = ("stage", "data", "fsdp")
RULES = (("batch", "fsdp"), ("embed", "fsdp"), ("mlp", None), ("heads", None), ("kv", None), ("vocab", None))
EMBED, HEADS, HEAD, MLP, VOCAB, LENGTH, EXAMPLES = 8, 2, 4, 12, 16, 6, 2
STAGES, SHARDS, LAYERS = 2, 2, 2
MESH = jaxpp.MpmdMesh(
    Mesh(np.array(jax.devices()[:4]).reshape(STAGES, SHARDS, 1), AXES, axis_types=(AxisType.Auto,) * 3), "stage"
)
COLLECTIVES = re.compile(r"= (.*) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")
INIT, TX = nn.initializers.lecun_normal(), optax.adamw(0.05)


class Product(nn.Module):
    """A contraction of the last dimensions with a kernel that has logical axes."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    contracted: int = 1

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.param("kernel", nn.with_logical_partitioning(INIT, self.axes), self.shape)
        over = tuple(range(x.ndim - self.contracted, x.ndim)), tuple(range(self.contracted))
        return jax.lax.dot_general(x, jnp.asarray(kernel), (over, ((), ())))


class Norm(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.with_logical_partitioning(nn.initializers.ones, ("embed",)), (EMBED,))
        return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-5) * jnp.asarray(scale)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, segments: jax.Array, positions: jax.Array, deterministic: bool) -> Any:
        x = checkpoint_name(nn.with_logical_constraint(x, ("batch", None, "embed")), "decoder_layer_input")
        y = Norm(name="pre_attention")(x)
        q, k, v = (Product((EMBED, HEADS, HEAD), ("embed", "heads", "kv"), name=n)(y) for n in "qkv")
        q, k = (a + jnp.sin(positions)[..., None, None] for a in (q, k))
        mask = (positions[:, :, None] >= positions[:, None]) & (segments[:, :, None] == segments[:, None])
        weights = jax.nn.softmax(jnp.where(mask[:, None], jnp.einsum("bqhd,bkhd->bhqk", q, k), -1e9))
        y = checkpoint_name(jnp.einsum("bhqk,bkhd->bqhd", weights, v), "context")
        x = x + Product((HEADS, HEAD, EMBED), ("heads", "kv", "embed"), 2, name="out")(y)
        y = Norm(name="pre_mlp")(x)
        gate, up = (Product((EMBED, MLP), ("embed", "mlp"), name=n)(y) for n in ("wi_0", "wi_1"))
        y = nn.with_logical_constraint(nn.silu(gate) * up, ("batch", None, "mlp"))
        x = x + Product((MLP, EMBED), ("mlp", "embed"), name="wo")(nn.Dropout(0.1)(y, deterministic=deterministic))
        self.sow("intermediates", "activation_mean", jnp.mean(x))
        return x, None


class Decoder(nn.Module):
    scanned: bool

    @nn.compact
    def __call__(self, tokens: jax.Array, positions: jax.Array, segments: jax.Array, deterministic: bool = True) -> Any:
        init = nn.with_logical_partitioning(nn.initializers.normal(1.0), ("vocab", "embed"))
        y = jnp.asarray(self.param("token_embedder", init, (VOCAB, EMBED)))[tokens]
        policy = jax.checkpoint_policies.save_only_these_names("context")
        for stage in range(STAGES):
            last = stage == STAGES - 1
            layer: Any = (
                Layer if last else nn.remat(Layer, prevent_cse=not self.scanned, policy=policy, static_argnums=4)
            )
            if self.scanned:
                scan = nn.scan(
                    layer, {"params": 0, "intermediates": 0}, split_rngs={"params": True, "dropout": True},
                    in_axes=(nn.broadcast,) * 3, length=LAYERS, metadata_params={nn.PARTITION_NAME: "layers"},
                )  # fmt: skip
                y, _ = scan(name=f"layers_{stage}")(y, segments, positions, deterministic)
            else:
                for number in range(LAYERS):
                    y, _ = layer(name=f"layers_{stage}_{number}")(y, segments, positions, deterministic)
            y = y if last else jaxpp.pipeline_enter_stage(y, f"stage_{stage}")
        logits = Product((EMBED, VOCAB), ("embed", "vocab"), name="logits_dense")(Norm(name="decoder_norm")(y))
        return nn.with_logical_constraint(logits, ("batch", None, "vocab"))


def loss_fn(model: Decoder, data: Any, key: jax.Array, params: Any) -> Any:
    logits, intermediates = model.apply(
        params, data["inputs"], data["positions"], data["segments"], deterministic=False,
        rngs={"dropout": key}, mutable="intermediates",
    )  # fmt: skip
    weights = data["segments"] != 0
    total = jnp.sum(optax.softmax_cross_entropy_with_integer_labels(logits, data["targets"]) * weights)
    aux = {"intermediates": intermediates, "total_loss": total, "total_weights": weights.sum()}
    return total / (weights.sum() + 1e-8), aux


def update(state: Any, loss: jax.Array, aux: Any, grads: Any) -> Any:
    norm = jnp.sqrt(jaxpp.cross_mpmd_all_reduce(*(jnp.sum(g**2) for g in jax.tree.leaves(grads))))
    grads = jax.tree.map(lambda g: jnp.where(norm > 1.0, g / norm, g), grads)
    metrics = {"loss": loss.sum() / aux["total_weights"].sum(), "raw_grad_norm": norm, "mean_loss": loss.mean()}
    return state.apply_gradients(grads=grads), {"scalar": metrics, "intermediates": aux["intermediates"]}


def train_step(model: Decoder, shardings: Any, compute: Any, microbatches: int, state: Any, data: Any, key: Any) -> Any:
    params = jax.tree.map(jax.lax.with_sharding_constraint, state.params, compute)

    def compute_grads(data: Any) -> Any:
        return jax.value_and_grad(loss_fn, argnums=3, has_aux=True)(model, data, key, params)

    loop = jaxpp.treduce(
        jax.vmap(compute_grads, spmd_axis_name="data"),
        jax.tree.map(lambda a: a.reshape(SHARDS, microbatches, -1, LENGTH), data),
        axis=1,
        schedule=jaxpp.Interleaved1F1B(STAGES, STAGES),
        operation=(jaxpp.Concat(axis=1), {"params": jaxpp.Add}),
    )
    mapped = jax.tree.map(lambda s: NamedSharding(s.mesh, P("data", *s.spec)), compute)
    whole = NamedSharding(MESH.lowering_mesh(), P("data"))
    (loss, aux), grads = jax.lax.with_sharding_constraint(loop, (jax.tree.map(lambda _: whole, loop[0]), mapped))
    grads = jax.lax.with_sharding_constraint(jax.tree.map(partial(jnp.sum, axis=0), grads), shardings.params)
    return update(state, loss, aux, grads)


def ordinary_step(model: Decoder, microbatches: int, state: Any, data: Any, key: Any) -> Any:
    """The same step without `treduce`, `vmap` and stages: one part of the batch after another."""

    def compute_grads(part: Any) -> Any:
        return jax.value_and_grad(loss_fn, argnums=3, has_aux=True)(model, part, key, state.params)

    parts = jax.tree.map(lambda a: a.reshape(SHARDS * microbatches, -1, LENGTH), data)
    results, grads = jax.lax.map(compute_grads, parts)
    results = jax.tree.map(lambda x: x.reshape(SHARDS, microbatches, *x.shape[1:]), results)
    return update(state, *results, jax.tree.map(partial(jnp.sum, axis=0), grads))


def over_data(aval: Any, sharding: NamedSharding) -> NamedSharding:
    """Shard the first dimension that allows it over the data axis too, as ZeRO does."""
    for dim, size in enumerate(aval.shape):
        if size % SHARDS == 0:
            spec = [*sharding.spec, *[None] * (aval.ndim - len(sharding.spec))]
            spec[dim] = ("data", spec[dim]) if spec[dim] else "data"
            return NamedSharding(sharding.mesh, P(*spec))
    return sharding


def init_state(model: Decoder, key: jax.Array) -> Any:
    ones = jnp.ones((EXAMPLES, LENGTH), jnp.int32)
    params = {"params": model.init(key, ones, ones, ones)["params"]}
    return train_state.TrainState.create(apply_fn=model.apply, params=params, tx=TX)


def unboxed(tree: Any) -> Any:
    """Take the arrays out of their boxes, without the constraint that a box adds."""
    boxed = lambda leaf: isinstance(leaf, nn.LogicallyPartitioned)  # noqa: E731
    return jax.tree.map(lambda x: x.unbox(apply_constraint=False) if boxed(x) else x, tree, is_leaf=boxed)


def shardings_of(init: Any, key: jax.Array, zero: bool) -> tuple[Any, Any, Any]:
    """Return the shapes of the state, its shardings, and those of the parameters inside the loop."""
    mesh = MESH.lowering_mesh()
    boxed = jax.eval_shape(init, key)
    shapes = unboxed(boxed)
    shardings = nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh, (*RULES, ("layers", "stage")))
    compute = shardings.params
    if zero:
        shardings = shardings.replace(
            params=jax.tree.map(over_data, shapes.params, shardings.params),
            opt_state=jax.tree.map(over_data, shapes.opt_state, shardings.opt_state),
        )
    return shapes, shardings, compute


def batches(microbatches: int, count: int = 2) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    found = []
    for _ in range(count):
        tokens = rng.integers(0, VOCAB, (SHARDS * microbatches * EXAMPLES, LENGTH + 1)).astype(np.int32)
        positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), tokens[:, 1:].shape)
        segments = rng.integers(0, 3, (len(tokens), LENGTH)).astype(np.int32)
        found.append({"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "positions": positions, "segments": segments})
    return found


def collectives(compiled: Any) -> tuple[list[str], list[str]]:
    """The collectives of the loop's tasks and of all others, one for each array that is no scalar."""
    found: tuple[list[str], list[str]] = [], []
    for task, executable in zip(compiled.program.tasks, compiled.executables.tasks, strict=True):
        for shapes, name in COLLECTIVES.findall(executable.as_text()):
            found[task.stage is None].extend([name] * len(re.findall(r"\w+\[\d", shapes)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("scanned", "zero", "microbatches"), [(True, True, 2), (False, False, 4)])
def test_the_step_of_maxtext(scanned: bool, zero: bool, microbatches: int):
    model, key = Decoder(scanned), jax.random.key(0)
    init = partial(init_state, model)
    made = jax.jit(lambda k: unboxed(init(k)))
    data, steps = batches(microbatches), jax.random.key(1)
    with nn.logical_axis_rules(RULES), jax.set_mesh(MESH.lowering_mesh()):
        shapes, shardings, compute = shardings_of(init, key, zero)
        step = partial(train_step, model, shardings, compute, microbatches)
        by_all_axes = NamedSharding(MESH.lowering_mesh(), P(AXES))
        places: Any = {"in_shardings": (shardings, by_all_axes, None), "out_shardings": (shardings, None)}
        pipelined = jaxpp.mpmd_jit_with_loop(step, mpmd_mesh=MESH, donate_argnums=0, **places)
        placed = pipelined.trace_and_place(shapes, data[0], steps)
        ranks = jax.tree.map(lambda s: s.mesh_ids, placed.in_shardings[0][0])
        state = jaxpp.mpmd_jit_rev(
            lambda k: unboxed(init(k)), MESH, out_refs=ranks, out_shardings=shardings
        )(key)  # fmt: skip
        tree_allclose(state, made(key))
        metrics = {}
        for batch in data:
            state, metrics = pipelined(state, batch, steps)
    (compiled,) = set(pipelined._placed.values())  # one compilation: the state is as the step wants it
    assert compiled.in_shardings == placed.in_shardings

    plain, expected = made(key), {}
    with nn.logical_axis_rules(RULES):
        reference = jax.jit(partial(ordinary_step, model, microbatches))
        for batch in data:
            plain, expected = reference(plain, batch, steps)
    tree_allclose((state, metrics), (plain, expected))

    in_loop, after = collectives(compiled)
    assert in_loop == []
    assert after.count("all-reduce") == len(jax.tree.leaves(shapes.params)), "one for each gradient"
    # With ZeRO, the step gathers the parameters for the loop, once.
    assert set(after) == ({"all-reduce", "all-gather"} if zero else {"all-reduce"})
