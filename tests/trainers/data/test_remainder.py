"""A last batch with fewer examples: left out, or refused before a step."""

import itertools
import shutil
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.trainers import BatchError, Checkpoints, Logging
from jaxpp_flax.trainers.data.remainder import RemainderRule
from jaxpp_flax.trainers.data.stream import Batches
from jaxpp_flax.trainers.progress import Display
from tests.helpers import steps_in, tree_allclose
from tests.trainers.models import Layers
from tests.trainers.sharing import sharing_steps

WIDTH = Layers.WIDTH


def loss(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


@sharing_steps("progress", "checkpoints")
def trainer(progress=False, **more):
    return PipelineTrainer(
        Layers(), optax.sgd(0.1), loss, num_stages=1, num_microbatches=4, logging=Logging(progress=progress), **more
    )


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A trainer, and where its first state is saved."""
    made, start = trainer(progress=True), tmp_path_factory.mktemp("shared") / "start"
    made.save(start)
    return made, start


@pytest.fixture
def it(shared):
    made, start = shared
    made.restore(start)
    return made


def batch(seed, size):
    x, y = np.random.default_rng(seed).normal(size=(2, size, WIDTH)).astype(np.float32)
    return {"x": x, "y": y}


def data(*sizes):
    return [batch(seed, size) for seed, size in enumerate(sizes)]


def stream(batches):
    yield from batches


def weights(of):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(of.state.params)]


def test_a_list_with_such_a_batch_is_refused_before_the_first_step(it):
    with pytest.raises(BatchError, match=r'batch 2 of the 3 in data has 5 examples.*first one has 8.*remainder="drop"'):
        it.fit(data(8, 8, 5))
    with pytest.raises(BatchError, match=r"batch 1 of the 2 in data has 4 examples.*first one has 8"):
        it.fit(data(8, 4))  # which could be cut
    with pytest.raises(BatchError, match=r"batch 1 of the 2 in data has 8 examples.*first one has 4.*full batch first"):
        it.fit(data(4, 8), remainder="drop")
    assert it.step == 0
    it.fit(data(8, 8, 5), steps=2)  # which never reaches that batch
    assert it.step == 2


def test_drop_trains_on_the_other_batches(it, shared):
    found = []
    for data_of_run, how in ((data(8, 8), None), (data(8, 8, 5), "drop"), (stream(data(8, 8, 5)), "drop")):
        it.restore(shared[1])
        it.fit(data_of_run, remainder=how)
        assert it.step == 2
        found.append(weights(it))
    for dropped in found[1:]:
        tree_allclose(dropped, found[0], rtol=0, atol=0)


def test_data_of_unknown_sizes_is_not_refused_after_hours_but_told(it, capsys):
    it.fit(stream(data(8, 8, 5)))
    assert it.step == 2
    said = " ".join(capsys.readouterr().out.split())
    assert "a batch of 5 examples is left out" in said
    assert 'remainder="drop"' in said


def test_a_smaller_batch_that_can_be_cut_is_left_out_too(it, capsys):
    for how in ("drop", None):
        it.fit(stream(data(8, 4)), remainder=how)
        assert "a batch of 4 examples is left out" in " ".join(capsys.readouterr().out.split())
    assert it.step == 2
    assert len(it.steps.compiled) == 1


def test_error_is_an_error_at_that_batch_where_sizes_are_unknown(it):
    for size in (5, 4):
        with pytest.raises(BatchError, match=f"a batch of {size} examples.*first one has 8"):
            it.fit(stream(data(8, size)), remainder="error")


def test_a_batch_larger_than_the_first_is_refused(it):
    with pytest.raises(BatchError, match=r"a batch of 8 examples.*first one has 4.*full batch first"):
        it.fit(stream(data(4, 8)))


def test_a_pass_that_begins_with_the_smaller_batch_leaves_out_that_one(it):
    class Shuffled:
        passes = 0

        def __iter__(self):
            self.passes += 1
            return iter(data(8, 4) if self.passes == 1 else data(4, 8))

    it.fit(Shuffled(), epochs=2)
    assert it.step == 2


def test_a_first_batch_that_cannot_be_cut_is_refused(it):
    with pytest.raises(BatchError, match="a batch of 5 examples"):
        it.fit(stream(data(5, 8)), remainder="drop")


def test_training_steps_leaves_out_too(it):
    assert [step for step, _ in it.training_steps(stream(data(8, 5, 8)), remainder="drop")] == [1, 2]


def test_a_resumed_run_goes_on_at_the_right_batch(it, tmp_path):
    passes = data(8, 8, 4)
    it.fit(passes, epochs=2, remainder="drop")
    assert it.step == 4
    first, second = (trainer(checkpoints=Checkpoints(tmp_path, every=1, keep=None)) for _ in range(2))
    first.fit(passes, steps=3, remainder="drop")
    for steps in (3, 2, 1):
        for later in range(steps + 1, 5):
            shutil.rmtree(tmp_path / str(later), ignore_errors=True)
        second.fit(passes, epochs=2, remainder="drop", resume=True)
        assert steps_in(tmp_path) == [1, 2, 3, 4]
        tree_allclose(weights(second), weights(it), rtol=0, atol=0)


def test_the_steps_left_are_counted_without_the_batches_that_are_left_out():
    rule, passes = RemainderRule.of("drop", None, Display.silent()), data(8, 8, 5)
    assert Batches(passes, epochs=2, remainder=rule).steps_left() == 4
    assert Batches(passes, steps=3, epochs=2, remainder=rule).steps_left() == 3
    assert Batches(passes, epochs=1).steps_left() == 3


def test_what_does_not_fit_is_refused(it):
    with pytest.raises(ValueError, match=r"remainder='cut'.*\"drop\" or \"error\""):
        it.fit(data(8), remainder="cut")
    with pytest.raises(ValueError, match=r"global_batch_size=8: every batch then has so many"):
        it.fit(data(8), remainder="drop", global_batch_size=8)


def test_data_without_end_whose_remainder_is_left_out(it):
    class Passes:
        def __iter__(self):
            return iter(data(8, 5))

    it.fit(Passes(), steps=3)
    assert it.step == 3
    it.fit(itertools.islice(itertools.cycle(data(8, 5)), 6))
    assert it.step == 6


def test_a_sequence_that_loads_its_batches_is_not_read_before_the_first_step(it):
    class Lazy(Sequence):
        read = 0

        def __len__(self):
            return 3

        def __getitem__(self, index):
            if index >= 3:
                raise IndexError
            self.read += 1
            return data(8, 8, 5)[index]

    lazy = Lazy()
    for _ in it.training_steps(lazy):
        assert lazy.read == it.step
    assert it.step == 2
