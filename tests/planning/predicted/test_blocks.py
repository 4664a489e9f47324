"""What the policies that cut and plan are told of a step's blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxpp_flax.engine.traced import Marks, cut_at_every_mark
from jaxpp_flax.engine.tracing.markers import mark_stage_end
from jaxpp_flax.engine.tracing.treduce import treduce
from jaxpp_flax.planning.predicted.blocks import Blocks
from jaxpp_flax.schedules import GPipe
from tests.engine.toys import built, chain, chain_loss
from tests.helpers import DIM, batch_of


def blocks_of(step: Any, specs: Any, *args: Any, cuts: Sequence[int] | None = None, **axes: int) -> Blocks:
    """What a policy sees; `specs` has the partition of the leaves of each argument."""
    flat = [spec for spec, arg in zip(specs, args, strict=True) for _ in jax.tree.leaves(arg)]
    seen: list[Marks] = []

    def policy(marks: Any, num_stages: int) -> Any:
        seen.append(marks)
        return cut_at_every_mark(marks, num_stages) if cuts is None else cuts

    built(step, 2, *args, policy=policy, specs=flat, axes=axes)
    return Blocks.of(seen[-1])


def test_parameters_and_carries_are_counted_by_their_parts():
    def step(params: Any, mean: Any, batch: Any) -> Any:
        def body(mean: Any, mb: Any) -> Any:
            new = 0.9 * mean + 0.1 * mb["x"].mean(0)
            loss = lambda params: chain_loss(params, {**mb, "x": mb["x"] - new})  # noqa: E731
            return new, jax.value_and_grad(loss)(params)

        return treduce(body, batch, GPipe(2), init=mean)

    args = chain(2), np.zeros(DIM, np.float32), batch_of(4)
    blocks = blocks_of(step, (P(None), P("tensor"), P()), *args, tensor=2)
    whole = {h.argument: (h.kind, h.nbytes, h.blocks, h.shards) for h in blocks.holdings if h.argument is not None}
    # Counted from the end: x and y of the batch are the last two arguments, the mean stands before them.
    assert whole[-3] == ("parameters", 4 * DIM / 2, (0,), 2)
    assert whole[-1] == ("data", args[2]["y"].nbytes, (1,), 1)
    assert whole[-2] == ("data", args[2]["x"].nbytes, (0,), 1)
    sizes = [p[name].nbytes for p in args[0] for name in ("b", "w")]
    assert [whole[-7 + i] for i in range(4)] == [("parameters", sizes[i], (i // 2,), 1) for i in range(4)]


def test_a_carry_forbids_the_cuts_between_what_reads_and_what_writes_it():
    def step(params: Any, mean: Any, batch: Any) -> Any:
        def body(mean: Any, mb: Any) -> Any:
            def loss(params: Any) -> Any:
                x = mark_stage_end((mb["x"] - mean) @ params[0]["w"])
                y = mark_stage_end(jnp.tanh(x) @ params[1]["w"])
                return jnp.mean((y @ params[1]["w"] - mb["y"]) ** 2), 0.9 * mean + 0.1 * jnp.cos(x).mean(0)

            (value, new), grads = jax.value_and_grad(loss, has_aux=True)(params)
            return new, (value, grads)

        return treduce(body, batch, GPipe(2), init=mean)

    # The mean is read before the first mark, and what it becomes is computed behind that.
    blocks = blocks_of(step, (P(),) * 3, chain(2), np.zeros(DIM, np.float32), batch_of(4), cuts=[1])
    assert [cuts for cuts in ([], [0], [1], [0, 1]) if blocks.can_cut(cuts)] == [[], [1]]


def test_a_parameter_in_another_dtype_is_still_that_argument():
    def step(params: Any, batch: Any) -> Any:
        narrow = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        loss = lambda params, mb: chain_loss(params, mb).astype(jnp.float32)  # noqa: E731
        return treduce(lambda mb: jax.value_and_grad(loss)(narrow, mb), batch, GPipe(2))

    args = chain(2), batch_of(4)
    blocks = blocks_of(step, (P("tensor"), P()), *args, tensor=2)
    found = {h.argument: (h.nbytes, h.shards) for h in blocks.holdings if h.kind == "parameters"}
    sizes = [p[name].nbytes for p in args[0] for name in ("b", "w")]
    assert found == {-6 + i: (sizes[i] / 2 / 2, 2) for i in range(4)}  # half as wide, and one of two parts


def test_the_workspace_of_a_backward_counts_in_its_block_alone():
    def layer(x: jax.Array, p: Any) -> jax.Array:
        return jnp.sin(jnp.sin(jnp.sin(x @ p["w"]) @ p["w"]) @ p["w"])

    def loss(params: Any, mb: Any) -> jax.Array:
        x = mark_stage_end(layer(mb["x"], params[0]))
        return jnp.mean((jax.checkpoint(layer)(x, params[1]) - mb["y"]) ** 2)

    step = lambda params, batch: treduce(  # noqa: E731
        lambda mb: jax.value_and_grad(loss)(params, mb), batch, GPipe(2)
    )
    blocks = blocks_of(step, (P(), P()), chain(2), batch_of(4))
    found = {h.blocks: h.nbytes for h in blocks.holdings if h.kind == "workspace"}
    one, weight = batch_of(4)["x"][0].nbytes, chain(2)[0]["w"].nbytes
    # Three values of a layer at one time; the second one's are made again: two products, and sines that these read.
    assert found == {(0,): 3 * one, (1,): 5 * one + weight}


def test_one_task_of_forward_and_backward_holds_what_xla_writes():
    """What is made element by element has no place of its own: its readers make it again of a product's result."""

    def layer(x: jax.Array, p: Any) -> jax.Array:
        y = x @ p["w"]
        return x + jnp.sin(jnp.sin(jnp.exp(y.astype(jnp.bfloat16).astype(jnp.float32)))) @ p["w"]

    def loss(params: Any, mb: Any) -> jax.Array:
        return jnp.mean(layer(mark_stage_end(layer(mb["x"], params[0])), params[1]) ** 2)

    step = lambda params, batch: treduce(  # noqa: E731
        lambda mb: jax.value_and_grad(loss)(params, mb), batch, GPipe(2)
    )
    blocks, one = blocks_of(step, (P(), P()), chain(2), batch_of(4)), batch_of(4)["x"][0].nbytes

    def held(kind: str, block: int) -> float:
        return sum(h.nbytes for h in blocks.holdings if h.kind == kind and block in h.blocks)

    # As results of a forward: the exponential, two cosines, and the outer sine, which the second product reads.
    assert held("activations", 0) == 4 * one
    # In one task: the first product in bfloat16, as it is written, and the outer sine.
    assert held("fused", 0) == 1.5 * one
    # The second block reads its input, too, and the loss its result.
    assert held("activations", 1) - held("activations", 0) == held("fused", 1) - held("fused", 0) == 2 * one
