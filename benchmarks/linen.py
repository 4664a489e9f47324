"""Start and dispatch with a model as tutorials write it: a Linen transformer, flax's `TrainState`, adamw.

python benchmarks/linen.py                                         # dispatch: nothing but arrays and calls
python benchmarks/linen.py --width 64 --microbatches 8 --repeats 3 # time to first step; also with 128 and 512
python benchmarks/linen.py --stages 8 --blocks 16
python benchmarks/linen.py --cache /tmp/jax_cache                  # twice: the second start

A stage of two blocks has about 36 arrays of parameters; a backward task also takes their accumulators and residuals.
Interleaved schedules have two stages on a rank.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

from workload import Contestant, jaxpp, mesh, ours, parser, prepare, race, report, stage_of, tasks_in, use_cache

SCHEDULES = {"1F1B": "Std1F1B", "GPipe": "GPipe", "zero-bubble": "ZeroBubble", "interleaved": "Interleaved1F1B"}


def with_model(flags: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags of the model."""
    flags.set_defaults(blocks=8)
    flags.add_argument("--heads", type=int, default=2)
    flags.add_argument("--vocabulary", type=int, default=64)
    flags.add_argument("--different", action="store_true", help="no two blocks are alike")
    return flags


def transformer(arguments: Any, stages: int, library: Any) -> Any:
    """The model, with a mark between every two of its stages; its parameters do not depend on the stages."""
    from flax import linen as nn

    blocks, width = arguments.blocks, arguments.width

    class Block(nn.Module):
        hidden: int

        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = x + nn.MultiHeadDotProductAttention(arguments.heads)(nn.LayerNorm()(x))
            return x + nn.Dense(width)(nn.gelu(nn.Dense(self.hidden)(nn.LayerNorm()(x))))

    class Transformer(nn.Module):
        def setup(self) -> None:
            self.embed = nn.Embed(arguments.vocabulary, width)
            self.blocks = [Block(4 * width + 8 * i * arguments.different) for i in range(blocks)]
            self.norm, self.head = nn.LayerNorm(), nn.Dense(arguments.vocabulary)

        def stage(self, stage: int, x: Any) -> Any:
            """One stage: the first one takes tokens, the last one returns logits."""
            x = self.embed(x) if stage == 0 else x
            for i, block in enumerate(self.blocks):
                x = block(x) if stage_of(i, blocks, stages) == stage else x
            return self.head(self.norm(x)) if stage == stages - 1 else x

        def __call__(self, x: Any) -> Any:
            for stage in range(stages):
                x = self.stage(stage, x)
                x = library.mark_stage_end(x) if stage + 1 < stages else x
            return x

    return Transformer()


def schedule_of(title: str, ranks: int, library: Any) -> Any:
    """A schedule by its title; interleaved schedules have two stages on a rank."""
    counts = (2 * ranks, ranks) if title == "interleaved" else (ranks,)
    return getattr(library, SCHEDULES[title])(*counts)


def state_and_batch(arguments: Any, stages: int) -> tuple[Any, Any]:
    """A `TrainState` with adamw, of the same values for any number of stages, and token numbers."""
    import jax
    import numpy as np
    import optax
    from flax.training.train_state import TrainState

    shape = (arguments.microbatches, arguments.batch, arguments.length)
    batch = np.random.default_rng(0).integers(0, arguments.vocabulary, shape).astype(np.int32)
    params = transformer(arguments, 1, ours()).init(jax.random.key(0), batch[0])["params"]
    apply = transformer(arguments, stages, ours()).apply
    return TrainState.create(apply_fn=apply, params=params, tx=optax.adamw(1e-3)), batch


def cross_entropy(logits: Any, tokens: Any) -> Any:
    """The mean over the tokens, which are their own targets."""
    import optax

    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()


def train_step(schedule: Any, library: Any) -> Callable[..., Any]:
    """Gradient accumulation and `apply_gradients`: runs under plain `jax.jit` and as a pipeline of `library`."""
    import jax

    def step(state: Any, batch: Any) -> Any:
        def loss(params: Any, tokens: Any) -> Any:
            return cross_entropy(state.apply_fn({"params": params}, tokens), tokens)

        gradient = jax.value_and_grad(loss)
        losses, grads = library.treduce(lambda tokens: gradient(state.params, tokens), batch, schedule=schedule)
        return state.apply_gradients(grads=jax.tree.map(lambda g: g / batch.shape[0], grads)), losses

    return step


def hand_pieces(arguments: Any, model: Any, tx: Any, stages: int) -> Any:
    """The same model and optimizer for a loop by hand: a `TrainState` for each stage."""
    import jax
    from by_hand import Pieces
    from flax.training.train_state import TrainState

    def owner(name: str) -> int:
        if name.startswith("blocks_"):
            return stage_of(int(name.removeprefix("blocks_")), arguments.blocks, stages)
        return 0 if name == "embed" else stages - 1

    def split(state: Any) -> list[Any]:
        if isinstance(state, list):  # the result of an earlier step
            return state
        parts = [{name: p for name, p in state.params.items() if owner(name) == s} for s in range(stages)]
        return [TrainState.create(apply_fn=model.apply, params=part, tx=tx) for part in parts]

    return Pieces(
        split=split,
        merge=list,
        params_of=lambda part: part.params,
        forward=lambda stage, params, x: model.apply({"params": params}, stage, x, method="stage"),
        loss=cross_entropy,
        update=lambda part, grads: part.apply_gradients(
            grads=jax.tree.map(lambda g: g / arguments.microbatches, grads)
        ),
    )


def arrays_of_a_task(compiled: Any) -> float:
    """The mean number of arrays that a task of a stage takes."""
    counts = [len(task.graph.inputs) for task in compiled.program.tasks if task.stage is not None]
    return sum(counts) / len(counts)


def first_step(contestant: Contestant) -> float:
    """Seconds from the call to the end of the first step."""
    start = time.perf_counter()
    contestant.run()
    return time.perf_counter() - start


def main() -> None:
    flags = with_model(parser(__doc__ or ""))
    flags.add_argument("--schedules", nargs="+", default=list(SCHEDULES), choices=list(SCHEDULES))
    flags.add_argument("--cache", default=None, help="directory of JAX's persistent compilation cache")
    arguments = flags.parse_args()
    prepare(arguments, arguments.stages)
    import jax
    from by_hand import hand_written_step

    from jaxpp_flax.schedules import Std1F1B

    use_cache(arguments.cache)
    ranks, microbatches = arguments.stages, arguments.microbatches
    whole, batch = state_and_batch(arguments, ranks)
    plain = jax.jit(train_step(None, ours()), donate_argnums=0)
    by_hand = hand_written_step(
        hand_pieces(arguments, transformer(arguments, ranks, ours()), whole.tx, ranks), Std1F1B(ranks), microbatches
    )
    contestants = {"plain jax.jit, one device": Contestant(plain, whole, batch)}
    contestants["a loop written by hand, 1F1B"] = Contestant(by_hand, whole, batch)
    num_tasks = dict.fromkeys(contestants, tasks_in(Std1F1B(ranks), microbatches))
    ours_compiled: dict[str, Callable[[], Any]] = {}
    for library in (each for each in (ours(), jaxpp()) if each is not None):
        for title in arguments.schedules:
            if not hasattr(library, SCHEDULES[title]):
                continue
            schedule = schedule_of(title, ranks, library)
            step = library.mpmd_jit_with_loop(
                train_step(schedule, library), mpmd_mesh=mesh(ranks, library), donate_argnums=(0,)
            )
            mirror = schedule_of(title, ranks, ours())
            state = whole.replace(apply_fn=transformer(arguments, mirror.num_stages, library).apply)
            name = title if library is ours() else f"JaxPP, {title}"
            contestants[name] = Contestant(step, state, batch)
            num_tasks[name] = tasks_in(mirror, microbatches)
            if library is ours():
                ours_compiled[name] = lambda step=step, state=state: step.compile(state, batch)
    starts = {name: first_step(contestant) for name, contestant in contestants.items()}
    race(contestants, arguments.repeats)
    rows: list[dict[str, object]] = []
    first, hand = list(contestants)[:2]
    per_task = {name: c.median / num_tasks[name] * 1e6 for name, c in contestants.items()}
    for name, contestant in contestants.items():
        compiled = ours_compiled[name]() if name in ours_compiled else None
        rows.append(
            {
                "contestant": name,
                "s to first step": starts[name],
                "over plain": starts[name] / starts[first],
                "ms per step": contestant.median * 1e3,
                "step over plain": contestant.median / contestants[first].median,
                "tasks": num_tasks[name],
                "µs per task": per_task[name],
                "over by hand": per_task[name] / per_task[hand],
                "arrays of a task": arrays_of_a_task(compiled) if compiled else "",
                "lowerings": compiled.compiler.lowerings if compiled else "",
                "compilations": compiled.compiler.compilations if compiled else "",
                "executables": compiled.compiler.executables if compiled else "",
            }
        )
    title = f"{arguments.blocks} Linen blocks of width {arguments.width} on {ranks} ranks, {microbatches} microbatches"
    report(title, rows, arguments.json)


if __name__ == "__main__":
    main()
