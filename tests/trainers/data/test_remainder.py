"""A last batch with fewer examples: left out, filled with examples that do not count, or refused before a step."""

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.trainers import BatchError, Checkpoints, Logging, LossError
from jaxpp_flax.trainers.callbacks import OnMetrics
from tests.trainers.models import Layers

WIDTH = Layers.WIDTH


def losses(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2, axis=-1)


def mean_loss(model, batch):
    return jnp.mean(losses(model, batch))


def masked_loss(model, batch):
    of_examples, mask = losses(model, batch), batch["mask"]
    return (jnp.sum(of_examples * mask), jnp.sum(mask)), {"worst": (jnp.sum(of_examples**2 * mask), jnp.sum(mask))}


def trainer(loss=mean_loss, progress=False, **more):
    return PipelineTrainer(
        Layers(), optax.sgd(0.1), loss, num_stages=2, num_microbatches=4, logging=Logging(progress=progress), **more
    )


def batch(seed, size, mask=False):
    x, y = np.random.default_rng(seed).normal(size=(2, size, WIDTH)).astype(np.float32)
    return {"x": x, "y": y, **({"mask": np.ones(size, np.float32)} if mask else {})}


def data(*sizes, mask=False):
    return [batch(seed, size, mask) for seed, size in enumerate(sizes)]


def stream(batches):
    yield from batches


def weights(of):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(of.state.params)]


def assert_equal(one, other):
    for mine, theirs in zip(weights(one), weights(other), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_a_list_with_such_a_batch_is_refused_before_the_first_step():
    it = trainer()
    with pytest.raises(BatchError, match=r'batch 2 of the 3 in data has 5 examples.*first one has 8.*remainder="drop"'):
        it.fit(data(8, 8, 5))
    with pytest.raises(BatchError, match=r"batch 1 of the 2 in data has 4 examples.*first one has 8"):
        it.fit(data(8, 4))  # which could be cut
    with pytest.raises(BatchError, match=r"batch 1 of the 2 in data has 8 examples.*first one has 4.*full batch first"):
        it.fit(data(4, 8), remainder="drop")
    assert it.step == 0
    it.fit(data(8, 8, 5), steps=2)  # which never reaches that batch
    assert it.step == 2


@pytest.mark.parametrize("kind", [list, stream])
def test_drop_trains_on_the_other_batches(kind):
    dropped, plain = trainer(), trainer()
    dropped.fit(kind(data(8, 8, 5)), remainder="drop")
    plain.fit(data(8, 8))
    assert dropped.step == 2
    assert_equal(dropped, plain)


def test_data_of_unknown_sizes_is_not_refused_after_hours_but_told(capsys):
    it = trainer(progress=True)
    it.fit(stream(data(8, 8, 5)))
    assert it.step == 2
    said = " ".join(capsys.readouterr().out.split())
    assert "a batch of 5 examples is left out" in said
    assert 'remainder="drop"' in said


def test_a_smaller_batch_that_can_be_cut_is_left_out_too(capsys):
    it = trainer(progress=True)
    for how in ("drop", None):
        it.fit(stream(data(8, 4)), remainder=how)
        assert "a batch of 4 examples is left out" in " ".join(capsys.readouterr().out.split())
    assert it.step == 2
    assert len(it._core.executables.compiled) == 1


@pytest.mark.parametrize("size", [5, 4])
def test_error_is_an_error_at_that_batch_where_sizes_are_unknown(size):
    it = trainer()
    with pytest.raises(BatchError, match=f"a batch of {size} examples.*first one has 8"):
        it.fit(stream(data(8, size)), remainder="error")


def test_a_batch_larger_than_the_first_is_refused():
    it = trainer()
    with pytest.raises(BatchError, match=r"a batch of 8 examples.*first one has 4.*full batch first"):
        it.fit(stream(data(4, 8)))


def test_a_pass_that_begins_with_the_smaller_batch_leaves_out_that_one():
    class Shuffled:
        passes = 0

        def __iter__(self):
            self.passes += 1
            return iter(data(8, 4) if self.passes == 1 else data(4, 8))

    it = trainer()
    it.fit(Shuffled(), epochs=2)
    assert it.step == 2


def test_a_first_batch_that_cannot_be_cut_is_refused():
    with pytest.raises(BatchError, match="a batch of 5 examples"):
        trainer().fit(stream(data(5, 8)), remainder="drop")


@pytest.mark.parametrize("size", [5, 4, 1])
def test_pad_is_the_step_on_the_examples_alone(size):
    """The reference is one microbatch with no filling: sums in another order, so 1e-6 and not bitwise."""
    padded = trainer(masked_loss)
    seen = {}
    padded.fit(data(8, size, mask=True), remainder="pad", callbacks=[OnMetrics(lambda s, m: seen.update({s: m}))])
    plain = PipelineTrainer(Layers(), optax.sgd(0.1), masked_loss, num_stages=1, num_microbatches=1, logging=False)
    for step, one in enumerate(data(8, size, mask=True), start=1):
        metrics = plain.train_step(one)
        for name in ("loss", "worst", "weight"):
            np.testing.assert_allclose(seen[step][name], float(metrics[name]), rtol=1e-5)
    assert seen[2]["weight"] == size
    for mine, theirs in zip(weights(padded), weights(plain), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-7)
    assert len(padded._core.executables.compiled) == 1  # the filled batch runs on the step of the others


def test_pad_keeps_a_mask_that_the_data_has():
    first, last = data(8, 5, mask=True)
    last["mask"][0] = 0
    padded, shorter = trainer(masked_loss), trainer(masked_loss)
    padded.fit([first, last], remainder="pad")
    four = {name: leaf[1:] for name, leaf in last.items()}
    shorter.fit([first])
    shorter.train_step(four)
    for mine, theirs in zip(weights(padded), weights(shorter), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-7)


def only_the_loss(model, batch):
    return jnp.sum(losses(model, batch) * batch["mask"]), float(batch["x"].shape[0])


def a_mean_metric(model, batch):
    pair, _ = masked_loss(model, batch)
    return pair, {"mean": jnp.mean(losses(model, batch))}


@pytest.mark.parametrize(
    ("loss", "mask", "error", "words"),
    [
        (masked_loss, False, BatchError, r"'mask'.*a dict of 'x', 'y'.*jnp.sum\(batch\['mask'\]\)"),
        (mean_loss, True, LossError, "the loss is a mean.*jnp.sum"),
        (only_the_loss, True, LossError, "do not both use"),
        (a_mean_metric, True, LossError, "the metric 'mean' is a mean over all"),
    ],
)
@pytest.mark.parametrize("call", ["fit", "training_steps"])
def test_pad_is_refused_where_the_filling_would_count(loss, mask, error, words, call):
    it = trainer(loss)
    with pytest.raises(error, match=words):
        list(getattr(it, call)(stream(data(8, 5, mask=mask)), remainder="pad"))
    assert (it.step, it._core.executables.compiled) == (0, {})


def test_training_steps_leaves_out_too():
    assert [step for step, _ in trainer().training_steps(stream(data(8, 5, 8)), remainder="drop")] == [1, 2]


@pytest.mark.parametrize("how", ["drop", "pad"])
def test_a_resumed_run_goes_on_at_the_right_batch(tmp_path, how):
    loss = masked_loss if how == "pad" else mean_loss
    passes = data(8, 8, 4, mask=how == "pad")
    whole = trainer(loss)
    whole.fit(passes, epochs=2, remainder=how)
    for steps in range(1, whole.step):
        directory = tmp_path / str(steps)
        first = trainer(loss, checkpoints=Checkpoints(directory, every=1))
        first.fit(passes, steps=steps, remainder=how)
        second = trainer(loss, checkpoints=directory)
        second.fit(passes, epochs=2, remainder=how, resume=True)
        assert second.step == whole.step
        assert_equal(second, whole)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"remainder='cut'.*\"drop\", \"pad\" or \"error\""):
        trainer().fit(data(8), remainder="cut")
    with pytest.raises(ValueError, match=r"global_batch_size=8: every batch then has so many"):
        trainer().fit(data(8), remainder="drop", global_batch_size=8)


def test_data_without_end_whose_remainder_is_left_out():
    class Passes:
        def __iter__(self):
            return iter(data(8, 5))

    it = trainer()
    it.fit(Passes(), steps=3)
    assert it.step == 3
    it.fit(itertools.islice(itertools.cycle(data(8, 5)), 6))
    assert it.step == 6


def test_a_sequence_that_loads_its_batches_is_not_read_before_the_first_step():
    class Lazy(Sequence):
        read = 0

        def __len__(self):
            return 3

        def __getitem__(self, index):
            if index >= 3:
                raise IndexError
            self.read += 1
            return data(8, 8, 5)[index]

    it, lazy = trainer(), Lazy()
    for _ in it.training_steps(lazy):
        assert lazy.read == it.step
    assert it.step == 2
