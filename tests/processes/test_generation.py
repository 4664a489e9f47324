"""Generation as several processes: every process gets the tokens of all prompts, as one process does."""

from __future__ import annotations

import numpy as np
import optax
import pytest
from flax import nnx

from jaxpp_flax import PipelineTrainer
from tests.processes.running import run_processes, told
from tests.trainers.generation import models as m

pytestmark = pytest.mark.processes


def test_every_process_gets_the_tokens_of_one_process():
    trainer = PipelineTrainer(
        m.GPT(nnx.Rngs(0)), optax.sgd(0.1), m.loss_fn, num_stages=2, num_microbatches=2, logging=False
    )
    greedy = trainer.generate(m.PROMPTS, max_new_tokens=m.NEW)
    tokens = np.arange(20, dtype=np.int32).reshape(4, 5) % m.VOCABULARY
    trainer.train_step({"tokens": tokens, "targets": tokens})
    sampled = trainer.generate(m.PROMPTS, max_new_tokens=m.NEW, temperature=1.0, eos_token_id=3)
    expected = [[row.tolist() for row in rows] for rows in (greedy, sampled)]
    for output in run_processes(2, "run_generation.py"):
        assert told(output) == expected
