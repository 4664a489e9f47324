"""Run by `test_whole_batch.py` as several processes: a contrastive loss in two parts, against one `jax.jit`.

Usage: run_whole_batch.py [data]: two stages, each of two devices with "data".
"""

from __future__ import annotations

import faulthandler
import sys

from tests.processes.running import join_run

join_run()

import jax  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402

from jaxpp_flax import WholeBatchLoss  # noqa: E402
from tests.helpers import tree_allclose  # noqa: E402
from tests.trainers import two_towers as t  # noqa: E402


def main() -> None:
    faulthandler.dump_traceback_later(200, exit=True)
    loss, batch = WholeBatchLoss(t.embed, t.weighted_info_nce), t.pairs(16)
    has_data = "data" in sys.argv
    model = t.TwoTowers(dropout=0.5)
    options = {"mesh": {"data": 2}, "num_stages": 2} if has_data else {"num_stages": jax.device_count()}
    trainer = t.trainer_of(loss, model, tx=optax.sgd(1.0), **options)
    if has_data:  # each process passes the rows that it reads
        rows = trainer.rows_read(batch)
        own = {name: leaf[rows[name]] for name, leaf in batch.items()}
        assert len(own["weight"]) in (0, 8)
        metrics = trainer.train_step(own, global_batch_size=16)
    else:
        metrics = trainer.train_step(batch)
    trained, evaluated = trainer.gather_model(), trainer.evaluate([batch])["loss"]
    if jax.process_index() in (0, jax.process_count() - 1):  # one of each stage: it compiles the whole alone
        with jax.default_device(jax.local_devices()[0]):
            value, gradients, _ = t.whole_batch_step(loss, batch, model)
        np.testing.assert_allclose(float(metrics["loss"]), float(value), rtol=1e-5)
        before, after = (nnx.to_pure_dict(nnx.state(of, nnx.Param)) for of in (model, trained))
        moved = jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), before, after)
        expected = jax.tree.map(np.asarray, nnx.to_pure_dict(gradients))
        tree_allclose(moved, expected, rtol=1e-5, atol=1e-6)
        total, weight = t.weighted_info_nce(t.embed(eval_of(trained), batch), batch)
        np.testing.assert_allclose(evaluated, float(total / weight), rtol=1e-5)
    print("all done", flush=True)


def eval_of(model: nnx.Module) -> nnx.Module:
    model.eval()
    return model


main()
