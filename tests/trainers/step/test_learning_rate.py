"""The learning rate of a step is what the user gave, or what the optimizer's state shows; never a guess."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpp_flax.trainers.step.learning_rate import find_learning_rate

SCHEDULE = optax.linear_schedule(0.5, 0.1, 4)
EXPECTED = [0.5, 0.4, 0.3]
PARAMS = {"w": jnp.ones(3)}

SCHEDULED = {
    "injected": lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=SCHEDULE),
    "injected in a chain": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), optax.inject_hyperparams(optax.sgd)(learning_rate=SCHEDULE)
    ),
    "injected in MultiSteps": lambda: optax.MultiSteps(
        optax.inject_hyperparams(optax.sgd)(learning_rate=SCHEDULE), every_k_schedule=1
    ),
}


def rates(tx, steps=3, given=None):
    state, found = tx.init(PARAMS), []
    rate = find_learning_rate(state, given)
    for step in range(steps):
        _, state = tx.update(PARAMS, state, PARAMS)
        found.append(float(rate(step, state)))
    return found


@pytest.mark.parametrize("name", SCHEDULED)
def test_schedules(name):
    np.testing.assert_allclose(rates(SCHEDULED[name]()), EXPECTED, rtol=1e-6)


def test_the_rate_of_sgd_is_the_update_over_the_gradient():
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=SCHEDULE)
    state = tx.init(PARAMS)
    updates, after = tx.update(PARAMS, state, PARAMS)
    assert float(find_learning_rate(state)(0, after)) == -float(updates["w"][0])


def test_a_rate_that_the_user_changes_in_the_state():
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.5)
    state = tx.init(PARAMS)
    state.hyperparams["learning_rate"] = jnp.float32(0.125)
    assert float(find_learning_rate(state)(0, tx.update(PARAMS, state, PARAMS)[1])) == 0.125


def test_a_given_rate_comes_first():
    for tx in (optax.sgd(1.0), optax.inject_hyperparams(optax.sgd)(learning_rate=1.0)):
        assert rates(tx, given=0.5) == [0.5] * 3
        np.testing.assert_allclose(rates(tx, given=SCHEDULE), EXPECTED, rtol=1e-6)


def test_no_other_number_is_taken_for_the_rate():
    """The last factor of Adafactor's chain is -1, and that of SGD is the rate: a search cannot tell them apart."""
    unknown = {
        "adafactor": optax.adafactor(1e-3),
        "rprop": optax.rprop(1e-3),
        "sgd": optax.sgd(1e-3),
        "several": optax.chain(*[optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)] * 2),
    }
    found = {name: find_learning_rate(tx.init(PARAMS)) for name, tx in unknown.items()}
    assert found == dict.fromkeys(unknown)
