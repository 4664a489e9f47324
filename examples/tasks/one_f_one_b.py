"""1F1B by hand, for any number of stages: each rank's tasks are written out, with what a compiler could not know.

- The weights of a stage are cut over `fsdp`. Its first task gathers them, once for the whole step.
- Gradients stay partial sums on the devices of `fsdp` while microbatches add to them; the last backward task of a stage
  adds the partial sums up and scatters the result, once for the whole step.
- What a forward task saves for its backward task waits in host memory: the next forward task of the stage sends it
  there while it computes, and the task before the backward task brings it back.
- The last stage runs forward and backward of a microbatch as one task.

    python examples/tasks/one_f_one_b.py --stages 4 --fsdp 2
    python -m jaxpp_flax.launch -n 2 --devices-per-process 2 examples/tasks/one_f_one_b.py --stages 2 --fsdp 2
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpp_flax import tasks

WIDTH, HIDDEN, LAYERS = 16, 32, 2  # layers in each stage
FSDP = frozenset({"fsdp"})
BATCH = P("fsdp", None)
# How a layer's two matrices lie: cut between steps, whole while they are used, and partial sums as gradients.
CUT = (P("fsdp", None), P(None, "fsdp"))
WHOLE = (P(None, None, reduced=FSDP),) * 2
PARTIAL = (P(None, None, unreduced=FSDP),) * 2


def layer(weights: Any, x: jax.Array) -> jax.Array:
    w_in, w_out = weights
    return x + jnp.tanh(x @ w_in) @ w_out


def loss_of(y: jax.Array, target: jax.Array) -> jax.Array:
    return jnp.mean((y - target) ** 2)


def whole_loss(weights: Any, x: jax.Array, target: jax.Array) -> jax.Array:
    """The same model without stages, for comparison."""
    for stage in weights:
        for of_layer in stage:
            x = layer(of_layer, x)
    return loss_of(x, target)


# What the tasks compute. `leaving` goes to host memory and `arriving` comes from there, beside the task's own work.


def gather(weights: Any) -> Any:
    return [tuple(map(jax.sharding.reshard, of_layer, WHOLE)) for of_layer in weights]


def forward(weights: Any, x: jax.Array, leaving: Any, arriving: Any) -> Any:
    saved = []
    for of_layer in weights:
        saved.append(x)  # the input of each layer is enough: its backward computes the layer again
        x = layer(of_layer, x)
    return x, saved, to_host(leaving), to_device(arriving)


def backward(sums: Any, weights: Any, saved: Any, dy: jax.Array, leaving: Any, arriving: Any, *, last: bool) -> Any:
    grads: list[Any] = []
    for of_layer, x in zip(reversed(weights), reversed(saved), strict=True):
        of_layer_grads, dy = jax.vjp(layer, of_layer, x)[1](dy)
        grads.insert(0, of_layer_grads)
    sums = jax.tree.map(jnp.add, sums, grads)
    if last:
        sums = [tuple(map(jax.sharding.reshard, of_layer, CUT)) for of_layer in sums]
    return sums, dy, to_host(leaving), to_device(arriving)


def forward_and_backward(sums: Any, weights: Any, x: jax.Array, target: jax.Array, *, last: bool) -> Any:
    y, saved, *_ = forward(weights, x, (), ())
    loss, dy = jax.value_and_grad(loss_of)(y, target)
    sums, dx, *_ = backward(sums, weights, saved, dy, (), (), last=last)
    return loss, sums, dx


def to_host(values: Any) -> Any:
    return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Host), values)


def to_device(values: Any) -> Any:
    return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device), values)


def order_of(stage: int, stages: int, microbatches: int) -> list[tuple[str, int]]:
    """Return the tasks of a stage: some forward tasks ahead, then a forward and a backward in turn."""
    if stage == stages - 1:
        return [("both", m) for m in range(microbatches)]
    # Two ahead for each later stage: one for its forward, one so that transfers take no time from tasks.
    ahead = min(2 * (stages - 1 - stage) + 1, microbatches)
    order = [("forward", m) for m in range(ahead)]
    for m in range(microbatches):
        order.append(("backward", m))
        if ahead + m < microbatches:
            order.append(("forward", ahead + m))
    return order


class Stage:
    """The tasks of one rank, called in its order; it holds what one task leaves for a later one."""

    def __init__(self, mesh: Mesh, order: list[tuple[str, int]], weights: Any) -> None:
        self.order = order
        on = partial(NamedSharding, mesh)
        self.batch, self.scalar = on(BATCH), on(P())
        whole, self.partial, self.cut = ([tuple(map(on, specs))] * LAYERS for specs in (WHOLE, PARTIAL, CUT))
        self.saved_there = on(BATCH, memory_kind="pinned_host")
        self.weights = tasks.task(gather, out_shardings=whole)(weights)
        zeros = partial(jax.tree.map, lambda w: jnp.zeros(w.shape, w.dtype, out_sharding=PARTIAL[0]))
        self.sums = tasks.task(zeros, out_shardings=self.partial, name="zeros")(weights)
        self.saved: dict[int, Any] = {}
        self.in_host_memory: set[int] = set()

    def _moves(self, at: int) -> tuple[list[int], list[int]]:
        """Return the microbatches whose saved values leave during the task at this place, and those that come back."""
        kind, m = self.order[at]
        backwards = [at for at, (kind, _) in enumerate(self.order) if kind == "backward"]
        leaving = [m - 1] if kind == "forward" and m and backwards[m - 1] > at + 2 else []
        arriving = [self.order[at + 1][1]] if at + 1 in backwards else []
        return leaving, [m for m in arriving if m in self.in_host_memory]

    def _moved(self, leaving: list[int], arriving: list[int], left: Any, arrived: Any) -> None:
        self.in_host_memory = self.in_host_memory.union(leaving).difference(arriving)
        self.saved.update(zip(leaving + arriving, left + arrived, strict=True))

    def forward(self, at: int, x: Any) -> Any:
        moves = leaving, arriving = self._moves(at)
        out = (self.batch, self.batch, self.saved_there, self.batch)
        m = self.order[at][1]
        y, self.saved[m], *moved = tasks.task(forward, out_shardings=out)(
            self.weights, x, *([self.saved[m] for m in which] for which in moves)
        )
        self._moved(leaving, arriving, *moved)
        return y

    def backward(self, at: int, dy: Any) -> Any:
        moves = leaving, arriving = self._moves(at)
        last = at == len(self.order) - 1
        out = (self.cut if last else self.partial, self.batch, self.saved_there, self.batch)
        saved = self.saved.pop(self.order[at][1])
        run = tasks.task(partial(backward, last=last), out_shardings=out, name="last_backward" if last else "backward")
        self.sums, dx, *moved = run(
            self.sums, self.weights, saved, dy, *([self.saved[m] for m in which] for which in moves)
        )
        self._moved(leaving, arriving, *moved)
        return dx

    def both(self, at: int, x: Any, target: Any) -> Any:
        last = at == len(self.order) - 1
        out = (self.scalar, self.cut if last else self.partial, self.batch)
        run = tasks.task(partial(forward_and_backward, last=last), out_shardings=out, name="last" if last else "both")
        loss, self.sums, dx = run(self.sums, self.weights, x, target)
        return loss, dx


def make_step(mesh: tasks.MpmdMesh, microbatches: int) -> tasks.MpmdFunction:
    """Return a function of (weights of each stage, inputs, targets), which gives losses and summed gradients."""
    stages = mesh.mpmd_dim
    on = [partial(NamedSharding, submesh) for submesh in mesh.unstack]
    weights_on = [[tuple(map(on[s], CUT))] * LAYERS for s in range(stages)]

    @tasks.mpmd(mesh, in_shardings=(weights_on, on[0](BATCH), on[-1](BATCH)), infer_donation=True)
    def step(weights: Any, inputs: Any, targets: Any) -> Any:
        ranks = [Stage(mesh.unstack[s], order_of(s, stages, microbatches), weights[s]) for s in range(stages)]
        arriving: dict[tuple[str, int, int], Any] = {("forward", 0, m): x for m, x in enumerate(inputs)}
        losses: list[Any] = []

        def send(value: Any, kind: str, stage: int, m: int) -> None:
            arriving[kind, stage, m] = tasks.transfer(value, out_shardings=on[stage](BATCH)).done

        def run(s: int, at: int) -> None:
            kind, m = ranks[s].order[at]
            came = arriving.pop(("backward" if kind == "backward" else "forward", s, m))
            value = came() if callable(came) else came
            if kind == "forward":
                send(ranks[s].forward(at, value), "forward", s + 1, m)
                return
            if kind == "backward":
                dx = ranks[s].backward(at, value)
            else:
                loss, dx = ranks[s].both(at, value, targets[m])
                losses.append(loss)
            if s:
                send(dx, "backward", s - 1, m)

        places = [0] * stages
        while any(at < len(rank.order) for at, rank in zip(places, ranks, strict=True)):
            for s, rank in enumerate(ranks):
                if (at := places[s]) < len(rank.order):
                    kind, m = rank.order[at]
                    if ("backward" if kind == "backward" else "forward", s, m) in arriving:
                        run(s, at)
                        places[s] += 1
        return losses, [rank.sums for rank in ranks]

    return step


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--fsdp", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=6)
    parser.add_argument("--text", action="store_true", help="print the program of each rank")
    flags = parser.parse_args(argv)
    if not jax.distributed.is_initialized():  # of several processes, the launcher knows the devices
        jax.config.update("jax_num_cpu_devices", flags.stages * flags.fsdp)
    devices = np.array(jax.devices()[: flags.stages * flags.fsdp]).reshape(flags.stages, flags.fsdp)
    mesh = tasks.MpmdMesh(Mesh(devices, ("stage", "fsdp"), axis_types=(AxisType.Explicit,) * 2), "stage")

    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(0, 0.3, shape).astype(np.float32)  # noqa: E731
    weights = [[(draw(WIDTH, HIDDEN), draw(HIDDEN, WIDTH)) for _ in range(LAYERS)] for _ in range(flags.stages)]
    inputs, targets = ([draw(8, WIDTH) for _ in range(flags.microbatches)] for _ in range(2))

    lowered = make_step(mesh, flags.microbatches).lower(weights, inputs, targets)
    if flags.text:
        for rank in range(flags.stages):
            print(f"--- rank {rank}\n{lowered.as_text(rank)}")
    losses, grads = lowered.compile()(weights, inputs, targets)

    plain = jax.jit(jax.value_and_grad(whole_loss))
    expected = [plain(weights, x, target) for x, target in zip(inputs, targets, strict=True)]
    expected_grads = jax.tree.map(lambda *of: sum(of), *[grad for _, grad in expected])
    compared = compare(losses, [loss for loss, _ in expected]) + compare(grads, expected_grads)
    mean = sum(loss for loss, _ in expected) / len(expected)
    print(f"process {jax.process_index()}: loss {mean:.6f}; {compared} arrays equal plain jax.jit")


def compare(found: Any, expected: Any) -> int:
    """Check the arrays of which this process has a part; return their number."""
    count = 0
    for array, whole in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        for shard in array.addressable_shards:
            # Sums over microbatches and over devices in another order: float32 to 1e-5, near zero to 1e-6.
            np.testing.assert_allclose(shard.data, np.asarray(whole)[shard.index], rtol=1e-5, atol=1e-6)
        count += bool(array.addressable_shards)
    return count


if __name__ == "__main__":
    main()
