"""Does a pipeline run here at all: the example's GPT in four stages, and the same training under plain `jax.jit`.

One batch is learned again and again: the loss must fall, and agree with plain gradient accumulation in float32.
"""

from __future__ import annotations

import time
from typing import Any

import workload
from memory import allocated
from trainers import batches, config, example, flags_of, trainer_of


def built(trainer: Any) -> dict[str, object]:
    """The bytes of a state that a factory makes, beside the allocator's peak while it was made."""
    import jax

    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(trainer.state))
    peak = allocated("peak_bytes_in_use")
    row = {"built": "by a factory", "state MB": nbytes / 1e6}
    return {**row, "allocator's peak MB": peak / 1e6 if peak else "", "over the state": peak / nbytes if peak else ""}


def plain_losses(arguments: Any, batch: Any) -> list[float]:
    """The losses of gradient accumulation on one device, with the trainer's values of the parameters."""
    import jax
    import optax
    from flax import nnx

    gpt, tx, microbatches = example(), optax.adamw(1e-3), arguments.microbatches
    graph, params = nnx.split(gpt.GPT(config(arguments), rngs=nnx.Rngs(0)))
    cut = jax.tree.map(lambda x: x.reshape(microbatches, -1, *x.shape[1:]), batch)

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        def accumulate(total: Any, microbatch: Any) -> Any:
            found = jax.value_and_grad(lambda p: gpt.loss_fn(nnx.merge(graph, p), microbatch))(params)
            return jax.tree.map(lambda a, b: a + b / microbatches, total, found), None

        zero = jax.tree.map(lambda p: 0.0 * p, (0.0, params))
        (loss, grads), _ = jax.lax.scan(accumulate, zero, cut)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    state, losses = tx.init(params), []
    for _ in range(arguments.repeats):
        params, state, loss = step(params, state)
        losses.append(float(loss))
    return losses


def main() -> None:
    arguments = flags_of(__doc__ or "").parse_args()
    workload.prepare(arguments, arguments.stages)
    import jax
    import numpy as np

    jax.config.update("jax_default_matmul_precision", "highest")
    (batch,) = batches(arguments, 1)
    start = time.perf_counter()
    trainer = trainer_of(arguments)
    workload.report("a model built by a factory", [built(trainer)], None)
    losses = [float(np.asarray(trainer.train_step(batch)["loss"]))]
    first = time.perf_counter() - start
    for _ in range(arguments.repeats - 1):
        losses.append(float(np.asarray(trainer.train_step(batch)["loss"])))
    row = {
        "trained": f"{arguments.stages} stages on {min(arguments.stages, len(jax.devices()))} of {jax.devices()[0]}",
        "s to first step": first,
        "first loss": losses[0],
        "last loss": losses[-1],
        "falls": losses[-1] < losses[0],
    }
    workload.report(f"{arguments.repeats} steps of a GPT", [row], None)
    plain = plain_losses(arguments, batch)
    apart = [abs(ours - theirs) / theirs for ours, theirs in zip(losses, plain, strict=True)]
    row = {"beside": "plain jax.jit", "first loss differs by": apart[0], "largest of all steps": max(apart)}
    workload.report("the same under plain jax.jit", [row], None)


if __name__ == "__main__":
    main()
