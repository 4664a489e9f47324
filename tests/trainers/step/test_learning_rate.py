"""The learning rate of a step equals the factor by which Optax multiplied the update of that step."""

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
    "sgd": lambda: optax.sgd(SCHEDULE),
    "adamw": lambda: optax.adamw(SCHEDULE),
    "lion": lambda: optax.lion(SCHEDULE),
    "chain of chains": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(SCHEDULE)),
    "factors written out": lambda: optax.chain(
        optax.scale_by_adam(), optax.scale_by_schedule(SCHEDULE), optax.scale(-1.0)
    ),
    "a factor of the gradients is none": lambda: optax.chain(optax.scale(7.0), optax.adam(SCHEDULE)),
    "two counters": lambda: optax.chain(
        optax.scale_by_schedule(lambda count: 7.0), optax.scale_by_adam(), optax.scale_by_learning_rate(SCHEDULE)
    ),
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
    rate = find_learning_rate(tx, state, given)
    for step in range(steps):
        _, after = tx.update(PARAMS, state, PARAMS)
        found.append(float(rate(step, state, after)))
        state = after
    return found


@pytest.mark.parametrize("name", SCHEDULED)
def test_schedules(name):
    np.testing.assert_allclose(rates(SCHEDULED[name]()), EXPECTED, rtol=1e-6)


@pytest.mark.parametrize("make", [optax.sgd, optax.adamw, optax.inject_hyperparams(optax.adamw)])
def test_numbers(make):
    np.testing.assert_allclose(rates(make(0.25)), [0.25] * 3, rtol=1e-6)


def test_the_rate_of_sgd_is_the_update_over_the_gradient():
    tx = optax.sgd(SCHEDULE)
    state = tx.init(PARAMS)
    updates, after = tx.update(PARAMS, state, PARAMS)
    assert float(find_learning_rate(tx, state)(0, state, after)) == -float(updates["w"][0])


def test_a_rate_that_the_user_changes_in_the_state():
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.5)
    state = tx.init(PARAMS)
    state.hyperparams["learning_rate"] = jnp.float32(0.125)
    assert float(find_learning_rate(tx, state)(0, state, tx.update(PARAMS, state, PARAMS)[1])) == 0.125


def test_a_given_rate_comes_first():
    assert rates(optax.sgd(1.0), given=0.5) == [0.5] * 3
    np.testing.assert_allclose(rates(optax.sgd(1.0), given=SCHEDULE), EXPECTED, rtol=1e-6)


def by_hand():
    def update(updates, state, params=None):
        return updates, state

    return optax.GradientTransformation(lambda params: (), update)


REFUSED = {
    "another's optimizer": (by_hand, "none that can be found"),
    "no rate": (optax.identity, "none that can be found"),
    "the rate is not the last part": (lambda: optax.chain(optax.sgd(0.1), optax.add_decayed_weights(0.1)), "none that"),
    "several": (
        lambda: optax.chain(*[optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)] * 2),
        "2 hyperparameters of this name",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_found_is_refused(name):
    make, text = REFUSED[name]
    tx = make()
    with pytest.raises(ValueError, match=rf"{text}.*Logging\(learning_rate=schedule\).*inject_hyperparams"):
        find_learning_rate(tx, tx.init(PARAMS))
