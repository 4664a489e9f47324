"""How far a pipeline's update is from the whole batch's under plain `jax.jit`, for models where they may differ.

A figure is the norm of the difference of all weights over the norm of the plain run's change of weights.

python benchmarks/differences.py
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from workload import parser, prepare, report


def main() -> None:
    flags = parser(__doc__ or "")
    flags.add_argument("--steps", type=int, nargs="+", default=[1, 50, 200])
    arguments = flags.parse_args()
    prepare(arguments, arguments.stages)

    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx

    from jaxpp_flax import PipelineStage, PipelineTrainer
    from jaxpp_flax.trainers import BatchStatisticsWarning

    class Dense(nnx.Module):
        """A dense layer, a norm, and a ReLU."""

        def __init__(self, norm: Callable[..., Any], width: int, rngs: nnx.Rngs) -> None:
            self.dense, self.norm = nnx.Linear(width, width, rngs=rngs), norm(width, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return nnx.relu(self.norm(self.dense(x)))

    class Attention(nnx.Module):
        """Attention with a bias of its keys, whose gradient is zero but for rounding."""

        def __init__(self, width: int, rngs: nnx.Rngs) -> None:
            self.norm = nnx.LayerNorm(width, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(2, width, width, decode=False, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return x + self.attention(self.norm(x))

    class Experts(nnx.Module):
        """The best of eight experts for each example."""

        def __init__(self, width: int, rngs: nnx.Rngs) -> None:
            self.norm, self.router = nnx.LayerNorm(width, rngs=rngs), nnx.Linear(width, 8, rngs=rngs)
            self.experts = nnx.Param(jax.random.normal(rngs.params(), (8, width, width)) / width**0.5)

        def __call__(self, x: jax.Array) -> jax.Array:
            hidden = self.norm(x)
            weights = jax.nn.softmax(self.router(hidden))
            chosen = jax.nn.one_hot(jnp.argmax(weights, axis=-1), 8) * weights
            return x + jnp.einsum("bi,eij,be->bj", hidden, self.experts[...], chosen)

    class Model(nnx.Module):
        def __init__(self, make: Callable[..., Any], width: int, rngs: nnx.Rngs) -> None:
            self.blocks = nnx.List([PipelineStage(make(width, rngs=rngs)) for _ in range(arguments.stages)])
            self.head = nnx.Linear(width, 10, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    def loss_fn(model: Model, batch: Any) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()

    def weights_of(model: Model) -> list[np.ndarray]:
        return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))]

    def norm(leaves: Sequence[np.ndarray]) -> float:
        return sum(float(np.sum(leaf**2)) for leaf in leaves) ** 0.5

    def compare(make: Callable[..., Any], shape: tuple[int, ...], tx: Any, microbatches: int, steps: int) -> float:
        random = np.random.default_rng(0)
        batches = [
            {"x": random.normal(size=shape).astype(np.float32), "y": random.integers(0, 10, shape[:-1])}
            for _ in range(steps)
        ]
        plain, model = (Model(make, shape[-1], nnx.Rngs(0)) for _ in range(2))
        before, optimizer = weights_of(plain), nnx.Optimizer(plain, tx, wrt=nnx.Param)

        @nnx.jit
        def step(model: Model, optimizer: nnx.Optimizer, batch: Any) -> None:
            optimizer.update(model, nnx.grad(loss_fn)(model, batch))

        trainer = PipelineTrainer(
            model, tx, loss_fn, num_stages=arguments.stages, num_microbatches=microbatches, mesh={}, logging=False
        )
        for batch in batches:
            step(plain, optimizer, batch)
            trainer.train_step(batch)
        after = weights_of(plain)
        apart = [a - b for a, b in zip(weights_of(trainer.gather_model()), after, strict=True)]
        return norm(apart) / norm([a - b for a, b in zip(after, before, strict=True)])

    def normalized(norm: Callable[..., Any]) -> Callable[..., Any]:
        return lambda width, rngs: Dense(norm, width, rngs)

    models = {
        "LayerNorm": (normalized(nnx.LayerNorm), (64, 32)),
        "BatchNorm": (normalized(nnx.BatchNorm), (64, 32)),
        "attention with key biases": (Attention, (16, 8, 16)),
        "top 1 of 8 experts": (Experts, (64, 32)),
    }
    cases = [(name, "sgd", 4, steps) for name in models for steps in arguments.steps]
    cases += [("BatchNorm", "sgd", count, arguments.steps[0]) for count in (1, 2, 8)]
    cases += [(name, "adam", 4, steps) for name in models if name != "BatchNorm" for steps in arguments.steps]
    cases += [("LayerNorm", "sgd", 8, steps) for steps in arguments.steps]  # chaotic on some machines
    rows = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BatchStatisticsWarning)
        for name, optimizer, microbatches, steps in cases:
            tx = optax.sgd(0.1) if optimizer == "sgd" else optax.adam(1e-3)
            apart = compare(*models[name], tx, microbatches, steps)
            rows.append(
                {"model": name, "optimizer": optimizer, "microbatches": microbatches, "steps": steps, "apart": apart}
            )
    report(f"distance from the whole batch, {arguments.stages} stages", rows, arguments.json)


if __name__ == "__main__":
    main()
