"""The slowest rank's time with balanced stages over that with even ones, measured: a GPT with a large vocabulary
head, a model whose layers grow, and a U-Net.

python benchmarks/balance.py
python benchmarks/balance.py --schedule interleaved_1f1b --stages-per-rank 2

Each rank's tasks are timed inside real training steps of one microbatch, so that no two ranks run at one time: on a
machine with fewer cores than ranks they would slow each other. The contestants take turns; medians over the steps.
"Expected" is the slowest rank over that of even stages; with several stages on a rank the aim is the step instead.
"""

from __future__ import annotations

import statistics
from typing import Any

from workload import parser, prepare, report


def models(arguments: Any) -> dict[str, Any]:
    """Each workload as (model, loss function, batch)."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx

    from jaxpp_flax import PipelineStage

    width, length, blocks = arguments.width, arguments.length, arguments.blocks
    rng = np.random.default_rng(0)

    class Block(nnx.Module):
        """Attention of one head, and a feed-forward layer."""

        def __init__(self, hidden: int, rngs: nnx.Rngs) -> None:
            self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(2)])
            self.qkv = nnx.Linear(width, 3 * width, rngs=rngs)
            self.out = nnx.Linear(width, width, rngs=rngs)
            self.widen, self.narrow = nnx.Linear(width, hidden, rngs=rngs), nnx.Linear(hidden, width, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            q, k, v = jnp.split(self.qkv(self.norms[0](x)), 3, -1)
            scores = jnp.where(jnp.tri(x.shape[1], dtype=bool), q @ k.swapaxes(1, 2) / width**0.5, -1e9)
            x = x + self.out(jax.nn.softmax(scores) @ v)
            return x + self.narrow(nnx.gelu(self.widen(self.norms[1](x))))

    class GPT(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.embed = nnx.Embed(arguments.vocabulary, width, rngs=rngs)
            self.blocks = nnx.List([PipelineStage(Block(4 * width, rngs), name=f"block_{i}") for i in range(blocks)])
            self.head = nnx.Linear(width, arguments.vocabulary, use_bias=False, rngs=rngs)

        def __call__(self, tokens: jax.Array) -> jax.Array:
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    class Growing(nnx.Module):
        """Feed-forward layers, each wider than the one before."""

        def __init__(self, rngs: nnx.Rngs) -> None:
            hidden = [width * (i + 1) for i in range(blocks)]
            self.blocks = nnx.List([PipelineStage(Block(h, rngs), name=f"block_{i}") for i, h in enumerate(hidden)])

        def __call__(self, x: jax.Array) -> jax.Array:
            for block in self.blocks:
                x = block(x)
            return x

    class Convolutions(nnx.Module):
        """Two convolutions of three by three, with a stride or on an image twice as large."""

        def __init__(self, channels: tuple[int, int], scale: float, rngs: nnx.Rngs) -> None:
            stride, self.enlarges = (2, 2) if scale < 1 else (1, 1), scale > 1
            self.first = nnx.Conv(*channels, kernel_size=(3, 3), strides=stride, rngs=rngs)
            self.second = nnx.Conv(channels[1], channels[1], kernel_size=(3, 3), rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            x = jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2) if self.enlarges else x
            return nnx.relu(self.second(nnx.relu(self.first(x))))

    class UNet(nnx.Module):
        """Two blocks a level. Channels double where the image is halved; values skip to the level of their size."""

        def __init__(self, rngs: nnx.Rngs) -> None:
            sizes = [max(1, width // 8) * 2**level for level in range(4)]
            down = zip([3, *sizes], sizes, [1, 0.5, 0.5, 0.5], strict=False)
            up = zip([sizes[3], 2 * sizes[2], 2 * sizes[1]], sizes[2::-1], [2.0] * 3, strict=True)
            layers = [
                PipelineStage(layer, name=f"level_{i}_{part}")
                for i, (a, b, scale) in enumerate((*down, *up))
                for part, layer in enumerate([Convolutions((a, b), scale, rngs), Convolutions((b, b), 1, rngs)])
            ]
            self.layers = nnx.List(layers)
            self.head = nnx.Conv(2 * sizes[0], 3, kernel_size=(1, 1), rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            skips = []
            for level in range(7):
                x = self.layers[2 * level + 1](self.layers[2 * level](x))
                if level < 3:
                    skips.append(x)
                elif level > 3:
                    x = jnp.concatenate([x, skips.pop()], -1)
            return self.head(x)

    def token_loss(model: GPT, tokens: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model(tokens), tokens).mean()

    def square(model: Growing | UNet, x: jax.Array) -> jax.Array:
        return (model(x) ** 2).mean()

    tokens = rng.integers(0, arguments.vocabulary, (arguments.batch, length)).astype(np.int32)
    values = rng.normal(size=(arguments.batch, length, width)).astype(np.float32)
    side = 8 * max(1, length // 16)  # halved three times
    images = rng.normal(size=(arguments.batch, side, side, 3)).astype(np.float32)
    return {
        f"GPT, {blocks} blocks of width {width}, vocabulary {arguments.vocabulary}": (GPT, token_loss, tokens),
        f"{blocks} blocks that grow from {width} to {blocks * width}": (Growing, square, values),
        f"U-Net of {max(1, width // 8)} to {8 * max(1, width // 8)} channels": (UNet, square, images),
    }


def main() -> None:
    flags = parser(__doc__ or "")
    flags.set_defaults(blocks=12, width=128, length=128, batch=4, repeats=15)
    flags.add_argument("--vocabulary", type=int, default=8192)
    flags.add_argument("--models", nargs="+", default=["GPT", "blocks", "U-Net"], help="words of the models' titles")
    flags.add_argument("--schedule", default="1f1b")
    flags.add_argument("--stages-per-rank", type=int, default=1)
    arguments = flags.parse_args()
    prepare(arguments, arguments.stages)
    import os

    if arguments.platform == "cpu":  # one thread for each device: a core each, as ranks have devices of their own
        single = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {single}"
    import jax
    import numpy as np
    import optax
    from flax import nnx
    from workload import mesh

    from jaxpp_flax import PipelineTrainer
    from jaxpp_flax.planning import plan
    from jaxpp_flax.planning.profile import task_costs
    from jaxpp_flax.schedules import simulate
    from jaxpp_flax.trainers import MeshOptions

    ways = ("even", "default", "operations", "estimated", "measured")
    for title, (model, loss, batch) in models(arguments).items():
        if not any(word in title.replace(",", "").split()[:2] for word in arguments.models):
            continue

        def trainer_of(model: Any, loss: Any, num_microbatches: int, **options: Any) -> PipelineTrainer:
            return PipelineTrainer(
                model(nnx.Rngs(0)),
                optax.sgd(1e-3),
                loss,
                num_stages=arguments.stages * arguments.stages_per_rank,
                mesh=MeshOptions(mesh=mesh(arguments.stages), num_ranks=arguments.stages),
                num_microbatches=num_microbatches,
                schedule=arguments.schedule,
                logging=False,
                **options,
            )

        # Stages are chosen for a step of many microbatches, and timed in steps of one.
        plans: dict[str, Any] = {}
        whole = np.concatenate([batch] * arguments.microbatches)
        for name in ways:
            planner = trainer_of(model, loss, arguments.microbatches, assignment="even" if name == "even" else "auto")
            if name == "default":
                planner.compile(whole)
                plans[name] = planner.plan
                continue
            costs = {"operations": "flops", "measured": None}.get(name, "estimated")
            if costs is None:
                planner.train_step(whole)
                costs = planner.profile_step(whole)
            plans[name] = plan(planner, whole, costs=costs)
        trainers = {name: trainer_of(model, loss, 1, assignment=plan) for name, plan in plans.items()}
        # Ways that come to the same stages are measured as one.
        of_sizes: dict[tuple[int, ...], str] = {}
        for name, trainer in trainers.items():
            trainer.compile(batch)
            of_sizes.setdefault(plans[name].stage_sizes, name)
        chosen = [trainers[name] for name in of_sizes.values()]
        profiles: list[list[Any]] = [[] for _ in chosen]
        for turn in range(arguments.repeats + 2):
            for k in range(len(chosen)):
                k = (k + turn) % len(chosen)  # nobody is always first
                profile = chosen[k].profile_step(batch)
                jax.block_until_ready(chosen[k].state)
                if turn >= 2:  # the first runs are slower
                    profiles[k].append(profile)
        # In each turn the slowest rank's time; ratios within a turn, where the machine is equally busy for all.
        busy = [[[sum(e.end - e.start for e in r) for r in p.measured.events] for p in of] for of in profiles]
        slowest = [[max(ranks) for ranks in of] for of in busy]
        rows: list[dict[str, Any]] = []
        for name in trainers:
            k = list(of_sizes).index(plans[name].stage_sizes)
            costs = task_costs([p.measured.events for p in profiles[k]], profiles[k][-1].stages)
            schedule = profiles[k][-1].schedule
            step = simulate(schedule, costs, num_microbatches=arguments.microbatches).makespan
            ratios = [mine / even for mine, even in zip(slowest[k], slowest[0], strict=True)]
            rows.append(
                {
                    "assignment": name,
                    "blocks in stages": "+".join(map(str, plans[name].stage_sizes)),
                    "slowest rank, ms": statistics.median(slowest[k]) * 1e3,
                    "over even": statistics.median(ratios),
                    "over the mean rank": statistics.median(max(ranks) / statistics.mean(ranks) for ranks in busy[k]),
                    "expected": 1.0 - (plans[name].gain or 0.0),
                    f"step of {arguments.microbatches} microbatches, simulated, ms": step * 1e3,
                }
            )
        report(f"balance: {title}, {arguments.stages} ranks, {arguments.schedule}", rows, arguments.json)


if __name__ == "__main__":
    main()
