"""Random sets of lengths: a step on `Microbatches` has the loss and the gradients of plain JAX on one padded batch.

`check(draw(seed))` runs the steps of one trainer again; a failure names its seed, and the shapes of its batch.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpp_flax import Microbatches, PipelineStage, PipelineTrainer
from jaxpp_flax.schedules import ResidualPlan, StageResiduals, by_name
from jaxpp_flax.trainers import Memory, MeshOptions, Training
from tests.helpers import slow_but, tree_allclose
from tests.trainers.models import VOCABULARY, WIDTH

pytestmark = [
    pytest.mark.filterwarnings("ignore::jaxpp_flax.trainers.MicrobatchLossWarning"),
    pytest.mark.filterwarnings("ignore::jaxpp_flax.trainers.MicrobatchStateWarning"),
]

SCHEDULES = ("gpipe", "1f1b", "eager_1f1b", "zero_bubble", "interleaved_1f1b", "zbv")
TWO_A_RANK = ("interleaved_1f1b", "zbv")
# Rows and length: few, since each is compiled for each stage. The rows of a mesh with two data shards are even.
SHAPES = ((2, 3), (4, 3), (2, 6), (4, 6), (2, 9))
MOST = 7  # microbatches

# Sums of float32 in another order. What is mathematically zero (the bias of keys under a softmax) is rounding alone.
RTOL, ATOL = 1e-5, 1e-6


@dataclass(frozen=True)
class Case:
    """A trainer, and the batches of its steps: the shapes of their microbatches."""

    seed: int
    stages: int  # one block each
    schedule: str
    mesh: tuple[tuple[str, int], ...]  # () for one device
    blocks: tuple[str, ...]
    tied: bool
    dropout: bool
    state: bool
    loss: str
    remat: str | None
    offload: bool
    order: str
    batches: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def ranks(self) -> int:
        return self.stages // 2 if self.schedule in TWO_A_RANK else self.stages


def draw(seed: int, sets: int = 10) -> Case:
    """The case of a seed, with so many batches; a shape may appear in a later one for the first time."""
    rng = random.Random(seed)
    stages = rng.choice([1, 2, 2, 2, 3, 4])
    schedule = rng.choice([name for name in SCHEDULES if name not in TWO_A_RANK or stages in (2, 4)])
    ranks = stages // 2 if schedule in TWO_A_RANK else stages
    axis = rng.choice([{"data": 1}, {"data": 2}, {"tensor": 2}] if ranks * 2 <= 8 else [{"data": 1}])
    mesh = {} if stages == 1 and axis == {"data": 1} else axis
    shapes = rng.sample(SHAPES, 3)

    def lengths(number: int) -> tuple[tuple[int, int], ...]:
        several = rng.randint(1, MOST) if schedule != "interleaved_1f1b" else ranks * rng.randint(1, MOST // ranks)
        return tuple(rng.choice(shapes[: 3 if number >= sets // 3 else 2]) for _ in range(several))

    return Case(
        seed=seed, stages=stages, schedule=schedule, mesh=tuple(mesh.items()),
        blocks=tuple(rng.choice(list(BLOCKS)) for _ in range(stages)), tied=rng.random() < 0.5,
        dropout=rng.random() < 0.25, state=rng.random() < 0.15, loss=rng.choice(list(LOSSES)),
        remat=rng.choice([None, None, None, "full"]), offload=bool(mesh) and rng.random() < 0.15,
        order=rng.choice(["cost", "cost", "given"]), batches=tuple(map(lengths, range(sets))),
    )  # fmt: skip


# ------------------------------------------------------------------ the model


class Attention(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.attend = nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs)

    def __call__(self, h: Any, mask: Any) -> Any:
        return h + self.attend(h, mask=mask[:, None, None, :] > 0)


class Wide(nnx.Module):
    """A tensor axis divides the weights."""

    def __init__(self, rngs: nnx.Rngs):
        cut = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "hidden"))
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs, kernel_init=cut)
        self.norm, self.down = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, h: Any, mask: Any) -> Any:
        return h + self.down(jnp.tanh(self.up(self.norm(h))))


class Experts(nnx.Module):
    """Each token goes to one of three experts, the likeliest."""

    def __init__(self, rngs: nnx.Rngs):
        self.router = nnx.Linear(WIDTH, 3, rngs=rngs)
        self.weights = nnx.Param(jax.random.normal(rngs.params(), (3, WIDTH, WIDTH)) / 3)

    def __call__(self, h: Any, mask: Any) -> Any:
        share = jax.nn.softmax(self.router(h))
        chosen = share * (share == share.max(-1, keepdims=True))
        return h + jnp.einsum("ble,bld,edf->blf", chosen, h, self.weights[...])


BLOCKS = {"attention": Attention, "wide": Wide, "experts": Experts}


class Model(nnx.Module):
    """Blocks, one a stage; perhaps a head that is the embedding, dropout, and a state that each microbatch changes."""

    def __init__(self, case: Case):
        rngs = nnx.Rngs(case.seed)
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.blocks = nnx.List([PipelineStage(BLOCKS[name](rngs)) for name in case.blocks])
        self.head = None if case.tied else nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs) if case.dropout else None
        self.seen = nnx.Variable(jnp.zeros(WIDTH)) if case.state else None

    def __call__(self, batch: Any) -> Any:
        h = self.embed(batch["tokens"])
        for block in self.blocks:
            h = block(h, batch["mask"])
        if self.seen is not None:
            mean = jax.lax.stop_gradient(h).mean((0, 1))
            h, self.seen[...] = h + self.seen[...], 0.5 * self.seen[...] + mean
        h = h if self.dropout is None else self.dropout(h)
        return self.embed.attend(h) if self.head is None else self.head(h)


def token_losses(model: Any, batch: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(model(batch), batch["targets"]) * batch["mask"]


def of_tokens(model: Any, batch: Any) -> Any:
    return token_losses(model, batch).sum(), batch["mask"].sum()


def with_metrics(model: Any, batch: Any) -> Any:
    losses, weight = token_losses(model, batch), batch["mask"].sum()
    return (losses.sum(), weight), {"square": ((losses**2).sum(), weight)}


def of_examples(model: Any, batch: Any) -> Any:
    return token_losses(model, batch).sum(1).mean()


LOSSES = {"tokens": of_tokens, "metrics": with_metrics, "examples": of_examples}


# ------------------------------------------------------------------ batches, and plain JAX


def batch_of(case: Case, number: int) -> Microbatches:
    """The batch of a step: some rows and some microbatches are padding alone."""
    rng = np.random.default_rng([case.seed, number])

    def item(place: int, rows: int, length: int) -> dict[str, Any]:
        tokens, targets = rng.integers(0, VOCABULARY, (2, rows, length)).astype(np.int32)
        lengths = rng.integers(0, length + 1, (rows, 1)) * (rng.random() < 0.9)
        lengths[0] += place == 0 and lengths[0] == 0
        return {"tokens": tokens, "targets": targets, "mask": (np.arange(length) < lengths).astype(np.float32)}

    return Microbatches([item(place, *shape) for place, shape in enumerate(case.batches[number])])


def padded(batch: Any) -> dict[str, Any]:
    """One batch of the size of the largest: rows and tokens behind the texts count nothing."""
    rows, length = MOST * max(rows for rows, _ in SHAPES), max(length for _, length in SHAPES)
    whole = {name: np.zeros((rows, length), leaf.dtype) for name, leaf in batch[0].items()}
    first = 0
    for item in batch:
        last, wide = first + len(item["mask"]), item["mask"].shape[1]
        for name, leaf in item.items():
            whole[name][first:last, :wide] = leaf
        first = last
    return whole


class Plain:
    """What plain JAX says of a step; what depends on the microbatches (keys, states) is computed one after another."""

    def __init__(self, case: Case):
        self.case, self.graphdef = case, nnx.graphdef(model_of(case))

        @jax.jit
        @partial(jax.value_and_grad, has_aux=True)
        def sums(params: Any, keys: Any, state: Any, step: Any, number: Any, batch: Any) -> Any:
            """The sum of the losses of a batch or a microbatch, with that of their squares, and the state after it."""
            fold = jax.random.fold_in
            keys = jax.tree.map(lambda x: fold(fold(x, step), number) if is_key(x) else x, keys)
            model = nnx.merge(self.graphdef, params, keys, state, copy=True)
            losses = token_losses(model, batch)
            return losses.sum(), ((losses**2).sum(), nnx.state(model, OTHER))

        self.sums = sums

    def step(self, model: Model, number: int, batch: Microbatches) -> tuple[Any, Any, Any]:
        """Return the metrics, the gradients and the state of a step from the model before it."""
        params, keys, state = nnx.split(model, nnx.Param, nnx.RngState, ...)[1:]
        batches = batch if self.case.dropout or self.case.state else [padded(batch)]
        total, more, grads = 0.0, 0.0, jax.tree.map(jnp.zeros_like, params)
        for place, part in enumerate(batches):
            (loss, (squares, state)), own = self.sums(params, keys, state, number, place, part)
            total, more, grads = total + loss, more + squares, jax.tree.map(jnp.add, grads, own)
        of_examples = self.case.loss == "examples"
        weight = sum(len(part["mask"]) if of_examples else part["mask"].sum() for part in batch)
        metrics = {"loss": total / weight} | ({"square": more / weight} if self.case.loss == "metrics" else {})
        return metrics, jax.tree.map(lambda x: x / weight, grads), state


OTHER = nnx.Not(nnx.Any(nnx.Param, nnx.RngState))


def is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


# ------------------------------------------------------------------ the comparison


def keeping_gradients(rate: float = 0.1) -> optax.GradientTransformation:
    """SGD whose state is the last gradients: a comparison of weights would not see their small errors."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda grads, *_: (jax.tree.map(lambda x: -rate * x, grads), grads),
    )


def model_of(case: Case) -> Model:
    with nnx.use_eager_sharding(False):
        return Model(case)


def trainer_of(case: Case) -> PipelineTrainer:
    rules = [("hidden", "tensor" if "tensor" in dict(case.mesh) else None)]
    mesh = MeshOptions(axes=dict(case.mesh), sharding_rules=rules) if case.mesh else None
    residuals = ResidualPlan([StageResiduals(offload=0.5) for _ in range(case.stages)]) if case.offload else None
    return PipelineTrainer(
        model_of(case), keeping_gradients(), LOSSES[case.loss], num_stages=case.stages, num_microbatches=4,
        schedule=by_name(case.schedule, case.stages, case.ranks), mesh=mesh,
        memory=Memory(remat=case.remat, residuals=residuals), training=Training(order=case.order, max_batch_shapes=100),
        logging=False,
    )  # fmt: skip


def check(case: Case) -> None:
    """Run all steps of a case, each from the state that the trainer has before it."""
    trainer, plain = trainer_of(case), Plain(case)
    for number in range(len(case.batches)):
        batch, model = batch_of(case, number), trainer.gather_model()
        metrics, grads, state = plain.step(model, number, batch)
        actual = trainer.train_step(batch)
        after = nnx.state(trainer.gather_model(), OTHER)
        try:
            tree_allclose(host({name: actual[name] for name in metrics}), host(metrics), rtol=RTOL)
            tree_allclose(host(trainer.state.opt_state), host(grads), rtol=RTOL, atol=ATOL)
            tree_allclose(host(after), host(state), rtol=RTOL)
        except AssertionError as error:
            raise AssertionError(f"step {number}, {case.batches[number]}: {error}") from error


def host(tree: Any) -> Any:
    """The leaves by path, as NumPy's arrays."""
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def check_seeds(seeds: Iterable[int], sets: int = 10) -> None:
    """Check the cases of all seeds, and tell every one that is wrong."""
    wrong: list[str] = []
    for seed in seeds:
        case = draw(seed, sets)
        try:
            check(case)
        except Exception as e:  # any error is a finding, and the other seeds run all the same
            wrong.append(f"{case}\n{type(e).__name__}: {e}")
        jax.clear_caches()
    assert not wrong, "\n\n".join(wrong)


@pytest.mark.parametrize("seed", slow_but(range(4), 0))
def test_random_lengths(seed: int):
    check_seeds([seed], sets=4)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("first", range(1_000, 1_100, 10))
def test_many_random_lengths(first: int):
    """Ten sets of each case: a thousand."""
    check_seeds(range(first, first + 10))
