"""Run by `test_lengths.py` as two processes: steps over microbatches of several shapes are those of plain JAX.

Usage: run_lengths.py CASE ... Cases: "few" (every process draws the same batches; each draws rows of its own; own rows
that are refused), "more" (the same batches with another schedule, examples divided between the processes), "differs"
(in step 3, process 1 draws other shapes), "resume DIRECTORY" (a run with examples of its own that ends early goes on),
"random COUNT SEED" (random sets of lengths, half of them by own rows).
"""

from __future__ import annotations

import faulthandler
import sys
import time
from functools import partial
from typing import Any

from tests.processes.running import join_run, join_watched_run

join_watched_run() if sys.argv[1] == "differs" else join_run()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402
from jax.sharding import Mesh  # noqa: E402

from jaxpp_flax import Microbatches, PipelineStage, PipelineTrainer, group_by_length  # noqa: E402
from jaxpp_flax.processes import exchange_values, process_group  # noqa: E402
from jaxpp_flax.processes.store import CoordinationError  # noqa: E402
from jaxpp_flax.trainers import Checkpoints  # noqa: E402
from jaxpp_flax.trainers.callbacks import Callback  # noqa: E402
from jaxpp_flax.trainers.errors import BatchError  # noqa: E402
from tests.helpers import tree_allclose  # noqa: E402

WIDTH, VOCABULARY, SECONDS = 8, 11, 200
TOKENS = 12  # of a microbatch, of each process
ROWS, LENGTH = 96, 12  # of the batch that plain JAX takes: eight microbatches of the shortest length
# A few steps of float32 in another order of sums; a lost token changes the loss in its third digit.
RTOL = 2e-5


class Mixer(nnx.Module):
    """Each token sees the mean of those of its row that count."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        mean = (x * mask[..., None]).sum(1, keepdims=True) / jnp.maximum(mask.sum(1), 1)[:, None, None]
        return x + jnp.tanh(self.linear(x + mean))


class Model(nnx.Module):
    """Two stages, with the embedding as head."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.blocks = nnx.List([PipelineStage(Mixer(rngs)) for _ in range(2)])

    def __call__(self, batch: Any) -> jax.Array:
        x = self.embed(batch["tokens"])
        for block in self.blocks:
            x = block(x, batch["mask"].astype(jnp.float32))
        return self.embed.attend(x)


MODEL = Model(nnx.Rngs(0))


def loss_fn(model: Any, batch: Any) -> Any:
    """The sum over tokens, and their number."""
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch), batch["tokens"])
    return (losses * batch["mask"]).sum(), batch["mask"].sum().astype(jnp.float32)


def trainer(*, data_across: bool, **options: Any) -> PipelineTrainer:
    """Two stages of two devices. `data_across`: each process has one device of each stage, else one stage."""
    devices = np.array(jax.devices()).reshape(2, 2)
    mesh = Mesh(devices.T if data_across else devices, ("stage", "data"))
    options = {"num_microbatches": 4, "num_stages": 2, "mesh": mesh, "logging": False, **options}
    return PipelineTrainer(Model(nnx.Rngs(0)), optax.sgd(0.1), loss_fn, **options)


@partial(jax.jit, static_argnums=0)
def value_and_grad(graphdef: Any, params: Any, batch: Any) -> Any:
    def value(params: Any) -> Any:
        total, weight = loss_fn(nnx.merge(graphdef, params), batch)
        return total / weight

    return jax.value_and_grad(value)(params)


class Plain:
    """Plain JAX in one process: one step on each list of microbatches, padded to one batch of one shape for all."""

    def __init__(self) -> None:
        self.graphdef, self.params = nnx.split(MODEL)

    def step(self, parts: list[dict[str, np.ndarray]]) -> float:
        batch = {"tokens": np.zeros((ROWS, LENGTH), np.int32), "mask": np.zeros((ROWS, LENGTH), bool)}
        row = 0
        for part in parts:
            rows, length = part["tokens"].shape
            for name, leaf in batch.items():
                leaf[row : row + rows, :length] = part[name]
            row += rows
        loss, grads = value_and_grad(self.graphdef, self.params, batch)
        self.params = jax.tree.map(lambda p, g: p - 0.1 * g, self.params, grads)
        return float(loss)

    def check(self, trained: PipelineTrainer) -> None:
        actual = jax.tree.map(np.asarray, jax.tree.leaves(nnx.state(trained.gather_model(), nnx.Param)))
        tree_allclose(actual, [np.asarray(leaf) for leaf in jax.tree.leaves(self.params)], rtol=RTOL, atol=1e-6)


def item(rows: int, length: int, rng: Any) -> dict[str, np.ndarray]:
    tokens = rng.integers(0, VOCABULARY, (rows, length)).astype(np.int32)
    return {"tokens": tokens, "mask": np.arange(length) < rng.integers(1, length + 1, (rows, 1))}


def batches_of(patterns: list[list[tuple[int, int]]], seed: int) -> list[Microbatches]:
    rng = np.random.default_rng(seed)
    return [Microbatches([item(rows, length, rng) for rows, length in pattern]) for pattern in patterns]


PATTERNS = [
    [(2, 4), (2, 8)], [(2, 8)], [(2, 8), (2, 4), (2, 8), (2, 4)], [(2, 4), (2, 8)],
]  # fmt: skip


def same(piped: PipelineTrainer, plain: Plain, batches: list[Microbatches]) -> None:
    """Every process draws the same batches."""
    assert piped.data_share() == ((jax.process_index(), 2) if piped.mesh.local_ranks == (0, 1) else (0, 1))
    for batch in batches:
        expected = plain.step([*batch])
        np.testing.assert_allclose(float(piped.train_step(batch)["loss"]), expected, rtol=RTOL)
    plain.check(piped)


def texts_of(seed: int, count: int, longest: int) -> list[np.ndarray]:
    """Texts of many lengths, most of them short; of one seed, in the share of each process."""
    rng = np.random.default_rng(seed)
    lengths = np.minimum(1 + rng.geometric(0.25, count), longest)
    return [rng.integers(0, VOCABULARY, length).astype(np.int32) for length in lengths]


def of_everyone(batch: Any) -> list[dict[str, np.ndarray]]:
    """The microbatches of all processes."""
    lists = [[{k: v.tolist() for k, v in part.items()} for part in batch]]
    (every,) = zip(*exchange_values(process_group(), "the batches of a test", lists), strict=True)
    return [{k: np.asarray(v) for k, v in part.items()} for parts in every for part in parts]


def own(
    piped: PipelineTrainer, plain: Plain, texts: list[list[np.ndarray]], *, lengths: tuple[int, ...], count: int = 4
) -> None:
    """Each process draws the texts of its own; every text of all of them counts once."""
    number, shares = piped.data_share()
    assert (number, shares) == (jax.process_index(), 2)
    mine = texts[number]
    groups = group_by_length(mine, lengths=lengths, tokens=TOKENS, num_microbatches=count, own_examples=True)
    seen = 0
    for batch in groups:
        together = of_everyone(batch)
        seen += sum(int(part["mask"].sum()) for part in batch)
        np.testing.assert_allclose(float(piped.train_step(batch)["loss"]), plain.step(together), rtol=RTOL)
    assert seen == sum(map(len, mine)), (seen, sum(map(len, mine)))
    plain.check(piped)


def fit_and_evaluate(piped: PipelineTrainer, plain: Plain, texts: list[np.ndarray]) -> None:
    """By own rows too: the loss of an evaluation, and the whole batch's size in the record of a step."""
    groups = group_by_length(texts, lengths=(4, 12), tokens=TOKENS, num_microbatches=4, own_examples=True)
    (batch, *_) = groups
    np.testing.assert_allclose(piped.evaluate([batch])["loss"], plain.step(of_everyone(batch)), rtol=RTOL)
    sizes = list[tuple[Any, Any]]()

    class Sizes(Callback):
        def on_step(self, trainer: Any, record: Any) -> None:
            sizes.append((record.global_batch_size, trainer.measures.count(record.batch, record.global_batch_size)))

    piped.fit(groups, steps=1, callbacks=[Sizes()])
    rows, tokens = (sum(part["tokens"].shape[0] for part in batch), sum(part["tokens"].size for part in batch))
    assert sizes == [(2 * rows, (2 * tokens, "tokens"))], (sizes, rows, tokens)


def resume(directory: str) -> None:
    """After a break, each process goes on with those of its own examples that it has not trained on."""

    def run(place: str, steps: int) -> list[float]:
        losses = list[float]()

        class Losses(Callback):
            def on_metrics(self, trainer: Any, step: int, metrics: Any) -> None:
                losses.append(float(metrics["loss"]))

        texts = texts_of(jax.process_index(), 100, 12)
        groups = group_by_length(texts, lengths=(4, 8, 12), tokens=TOKENS, num_microbatches=4, own_examples=True)
        piped = trainer(data_across=True, checkpoints=Checkpoints(f"{directory}/{place}", every=1))
        piped.fit(groups, steps=steps, resume=True, callbacks=[Losses()])
        return losses

    whole = run("whole", 6)
    parts = run("parts", 2), run("parts", 5), run("parts", 6)
    assert list(map(len, parts)) == [2, 3, 1], parts
    assert [loss for part in parts for loss in part] == whole, (parts, whole)
    assert len({*whole}) == 6, "each step has examples of its own"


def differs() -> None:
    """Both patterns are compiled in both processes; in the third step they take different ones."""
    piped = trainer(data_across=False)
    first, second = batches_of([[(2, 4), (2, 8)], [(2, 8), (2, 8), (2, 4)]], 0)
    for batch in (first, second):
        piped.train_step(batch)
    print("differs now", flush=True)
    piped.train_step(second if jax.process_index() else first)
    float(piped.train_step(first)["loss"])
    print("nothing was refused", flush=True)


def wrong() -> None:
    """Own rows that cannot be a step."""
    rng, process = np.random.default_rng(jax.process_index()), jax.process_index()
    piped = trainer(data_across=True)
    try:
        piped.train_step(Microbatches([item(2, 4, rng)], own_rows=True), global_batch_size=4)
    except BatchError as error:
        print(f"size: {error}", flush=True)
    try:
        piped.train_step(Microbatches([item(2, 4, rng), item(2, 8 if process else 4, rng)], own_rows=True))
    except CoordinationError as error:
        print(f"shapes: {error}", flush=True)


def random(count: int, seed: int) -> None:
    """Lengths, numbers of microbatches and texts by chance, on a trainer for each of two schedules and two layouts."""
    trainers: dict[Any, tuple[PipelineTrainer, Plain]] = {}
    for number in range(count):
        faulthandler.dump_traceback_later(5 * SECONDS, exit=True)
        rng = np.random.default_rng((seed, number))
        schedules = (["1f1b", "zero_bubble"], ["gpipe", "eager_1f1b"])[seed % 2]
        schedule, data_across = str(rng.choice(schedules)), bool(rng.integers(2))
        lengths = tuple(sorted(rng.choice([2, 4, 12], rng.integers(1, 4), replace=False).tolist()))
        each, by_rows = int(rng.integers(1, 9)), data_across and bool(rng.integers(2))
        what = f"{schedule}, {data_across=}, {by_rows=}, {each} microbatches, lengths {lengths}"
        print(f"set {number}: {what} (after {time.process_time():.0f} s of CPU)", flush=True)
        key = schedule, data_across
        if key not in trainers:
            trainers[key] = trainer(schedule=schedule, data_across=data_across), Plain()
        if by_rows:
            texts = [texts_of(int(rng.integers(1 << 20)), int(rng.integers(1, 30)), lengths[-1]) for _ in range(2)]
            shares = [rng.integers(1, lengths[-1] + 1, len(texts[i])) for i in range(2)]
            cut = [[text[:size] for text, size in zip(texts[i], shares[i], strict=True)] for i in range(2)]
            own(*trainers[key], cut if number % 2 else texts, lengths=lengths, count=each)
        else:
            shapes = [(2 * (TOKENS // length), length) for length in lengths]
            patterns = [[shapes[i] for i in rng.integers(0, len(shapes), each)] for _ in range(2)]
            same(*trainers[key], batches_of(patterns, number))
    print(f"{count} sets right", flush=True)


def main() -> None:
    case, *arguments = sys.argv[1:]
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    if case == "few":
        same(trainer(data_across=False), Plain(), batches_of(PATTERNS, 0))
        by_rows, plain, texts = trainer(data_across=True), Plain(), [texts_of(1, 9, 12), texts_of(2, 40, 12)]
        own(by_rows, plain, texts, lengths=(4, 12))
        fit_and_evaluate(by_rows, plain, texts[jax.process_index()])
        wrong()
    elif case == "more":
        same(trainer(data_across=True, schedule="zero_bubble"), Plain(), batches_of(PATTERNS, 1))
    elif case == "resume":
        resume(*arguments)
    elif case == "random":
        random(*map(int, arguments))
    else:
        differs()
    print("all done", flush=True)


main()
