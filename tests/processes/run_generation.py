"""Run by `test_generation.py` as several processes: prompts continued, before and after a step."""

from __future__ import annotations

import faulthandler

from tests.processes.running import join_run, tell

join_run()

import jax  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

from jaxpp_flax import PipelineTrainer  # noqa: E402
from tests.trainers.generation.models import GPT, NEW, PROMPTS, VOCABULARY, loss_fn  # noqa: E402


def main() -> None:
    faulthandler.dump_traceback_later(200, exit=True)
    trainer = PipelineTrainer(
        lambda rngs: GPT(rngs), optax.sgd(0.1), loss_fn, num_stages=jax.process_count(), num_microbatches=2,
        logging=False,
    )  # fmt: skip
    greedy = trainer.generate(PROMPTS, max_new_tokens=NEW)
    trainer.train_step(
        {name: np.arange(20, dtype=np.int32).reshape(4, 5) % VOCABULARY for name in ("tokens", "targets")}
    )
    sampled = trainer.generate(PROMPTS, max_new_tokens=NEW, temperature=1.0, eos_token_id=3)
    found = [[row.tolist() for row in rows] for rows in (greedy, sampled)]
    tell(found)


main()
