"""JAX's settings around a call of the trainer: what was compiled without one is not run under it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.trainers import Inference
from tests.trainers import models as m


@pytest.mark.parametrize("stages", [1, 2])
def test_settings_after_a_call_without_them(stages: int):
    trainer = PipelineTrainer(
        m.Tokens(rngs=nnx.Rngs(0)),
        optax.sgd(0.1),
        m.mean_loss,
        num_stages=stages,
        num_microbatches=2,
        inference=Inference(predict_fn=lambda model, tokens: model(tokens) / jnp.ones(m.VOCABULARY)),
        logging=False,
    )
    tokens = m.make_batch(4)["tokens"]
    before = np.asarray(trainer.predict(tokens))
    with jax.numpy_rank_promotion("raise"), pytest.raises(ValueError, match="rank_promotion"):
        trainer.predict(tokens)
    with jax.disable_jit():
        if stages == 1:  # `jax.jit` runs it operation by operation: sums of float32 in another order
            np.testing.assert_allclose(trainer.predict(tokens), before, rtol=1e-5, atol=1e-6)
        else:
            with pytest.raises(RuntimeError, match=r"disable_jit is on .* a pipelined step runs as compiled programs"):
                trainer.predict(tokens)
    np.testing.assert_array_equal(trainer.predict(tokens), before)
