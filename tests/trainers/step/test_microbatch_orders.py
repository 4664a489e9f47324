"""The order in which the trainer runs microbatches of several lengths, and what keeps the order of the data."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpp_flax import Microbatches, PipelineTrainer, group_by_length
from jaxpp_flax.trainers import Training
from tests.helpers import slow, tree_allclose
from tests.trainers.models import VOCABULARY, Model, Tokens

LENGTHS = (4, 16)


def loss_fn(model, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["tokens"]), batch["tokens"])
    return (losses * batch["mask"]).sum(), batch["mask"].sum()


def texts(count=40, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(1, VOCABULARY, int(n)).astype(np.int32) for n in rng.choice([2, 3, 6, 15], count)]


def uneven(*lengths):
    """Two rows for each of these lengths."""
    rng = np.random.default_rng(1)
    tokens = [rng.integers(1, VOCABULARY, (2, n)).astype(np.int32) for n in lengths]
    return Microbatches([{"tokens": each, "mask": np.ones(each.shape, bool)} for each in tokens])


def trainer_of(model, count=4, order="cost", schedule="1f1b"):
    return PipelineTrainer(
        model, optax.sgd(0.1), loss_fn, num_stages=2, num_microbatches=count, schedule=schedule,
        training=Training(order=order), logging=False,
    )  # fmt: skip


@pytest.mark.parametrize("schedule", ["1f1b", slow("zero_bubble"), slow("gpipe")])
def test_steps_over_groups_are_those_of_one_padded_batch(schedule):
    groups = group_by_length(texts(), lengths=LENGTHS, tokens=32, num_microbatches=4)
    trainer = trainer_of(Model(2, rngs=nnx.Rngs(0)), schedule=schedule)
    model, tx = Model(2, rngs=nnx.Rngs(0), marked=False), optax.sgd(0.1)
    graphdef, params = nnx.split(model, nnx.Param)[:2]

    @jax.jit
    def plain_step(params, batch):
        def mean(params):
            total, weight = loss_fn(nnx.merge(graphdef, params), batch)
            return total / weight

        loss, grads = jax.value_and_grad(mean)(params)
        return optax.apply_updates(params, tx.update(grads, tx.init(params))[0]), loss

    assert len(list(groups)) > 1
    for batch in groups:
        padded = [
            {name: np.pad(leaf, ((0, 0), (0, LENGTHS[-1] - leaf.shape[1]))) for name, leaf in microbatch.items()}
            for microbatch in batch
        ]
        params, loss = plain_step(params, jax.tree.map(lambda *rows: jnp.concatenate(rows), *padded))
        assert float(trainer.train_step(batch)["loss"]) == pytest.approx(float(loss), rel=1e-5)
    tree_allclose(nnx.to_pure_dict(nnx.state(trainer.gather_model(), nnx.Param)), nnx.to_pure_dict(params))


def test_the_order_is_told_once_and_batches_of_equal_microbatches_run_in_one_order(capsys):
    trainer = PipelineTrainer(
        Tokens(rngs=nnx.Rngs(0)), optax.sgd(0.1), loss_fn, num_stages=2, num_microbatches=6,
    )  # fmt: skip
    batches = [uneven(*lengths) for lengths in ((4, 16, 4, 4, 16, 4), (16, 4, 4, 4, 4, 16))]
    for batch in batches:
        trainer.train_step(batch)
    orders = list(trainer.steps.orders.chosen.values())
    assert len(orders) == 2
    assert orders[0].gain > 1
    lengths = [[batch[n]["tokens"].shape[1] for n in of.order] for batch, of in zip(batches, orders, strict=True)]
    assert lengths[0] == lengths[1]
    out = capsys.readouterr()
    assert (out.out + out.err).count("microbatches of a step run in an order by their cost") == 1


def test_the_given_order_is_kept_where_the_user_asks_for_it():
    given = trainer_of(Tokens(rngs=nnx.Rngs(0)), 6, "given")
    chosen = trainer_of(Tokens(rngs=nnx.Rngs(0)), 6)
    batch = uneven(4, 16, 4, 4, 16, 4)
    losses = [float(trainer.train_step(batch)["loss"]) for trainer in (given, chosen)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert given.steps.orders.chosen == {}


@pytest.mark.filterwarnings("ignore::jaxpp_flax.trainers.MicrobatchStateWarning")
def test_state_that_goes_from_one_microbatch_to_the_next_keeps_the_order(capsys):
    class Averaging(Tokens):
        def __init__(self, *, rngs):
            super().__init__(rngs=rngs)
            self.seen = nnx.Variable(jnp.zeros(()))

        def __call__(self, tokens):
            self.seen[...] = 0.5 * self.seen[...] + tokens.astype(jnp.float32).mean()
            return super().__call__(tokens)

    trainer = PipelineTrainer(Averaging(rngs=nnx.Rngs(0)), optax.sgd(0.1), loss_fn, num_stages=2, num_microbatches=3)
    batch = uneven(4, 16, 4)
    trainer.train_step(batch)
    first, second, third = (microbatch["tokens"].mean() for microbatch in batch)
    assert float(trainer.gather_model().seen[...]) == pytest.approx(third + 0.5 * (second + 0.5 * first), rel=1e-6)
    (order,) = trainer.steps.orders.chosen.values()
    assert order.is_given
    out = capsys.readouterr()
    assert "in the order of the data: the loss hands state" in out.out + out.err


def test_an_unknown_order_is_refused():
    with pytest.raises(ValueError, match="order='longest'"):
        Training(order="longest")
