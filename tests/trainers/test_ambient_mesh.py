"""A mesh of `jax.set_mesh` around any public call of a trainer changes nothing; for a step, see tests/engine too."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, PartitionSpec

from jaxpp_flax import Checkpoints, PipelineTrainer, planning
from jaxpp_flax.layers import add_lora, merge_lora
from jaxpp_flax.trainers import Callback, Inference, LogMetrics, MeshError, Training
from jaxpp_flax.verify import verify
from jaxpp_flax.verify.replay import Replay
from tests.helpers import slow, tree_allclose
from tests.trainers.generation.models import GPT
from tests.trainers.models import Layers, LinenModel, make_batch, make_xy, mean_loss, squared_error

BATCH = make_xy(4)


def trainer_of(model: Any = None, tx: Any = None, loss: Any = squared_error, **options: Any) -> PipelineTrainer:
    options = {"num_stages": 2, "num_microbatches": 2, "mesh": {}, "logging": False} | options
    return PipelineTrainer(model or Layers(), tx or optax.adam(1e-2), loss, **options)


def averaged() -> PipelineTrainer:
    return trainer_of(
        training=Training(ema_decay=0.5),
        inference=Inference(params=lambda state: state.ema, predict_fn=lambda model, batch: model(batch["x"])),
    )


def linen(make: Callable[[Callable[..., Any]], Any]) -> PipelineTrainer:
    module = LinenModel(2)
    return trainer_of(module, loss=mean_loss, variables=make(lambda key: module.init(key, make_batch(4)["tokens"])))


def adapted() -> PipelineTrainer:
    model = add_lora(Layers(), rank=2, layers="layers/0", rngs=nnx.Rngs(1))
    return trainer_of(model, training=Training(wrt=nnx.LoRAParam))


def stepped(trainer: PipelineTrainer, batch: Any = None) -> PipelineTrainer:
    trainer.train_step(BATCH if batch is None else batch)
    return trainer


def weights(model: Any) -> Any:
    return model.variables if hasattr(model, "variables") else nnx.to_pure_dict(nnx.state(model))


def tokens(trainer: PipelineTrainer) -> list[Any]:
    return trainer.generate([[1, 2], [3]], max_new_tokens=2, temperature=1.0)


def own_loop(trainer: PipelineTrainer) -> list[Any]:
    steps = trainer.training_steps([BATCH], steps=2, callbacks=[LogMetrics()])
    return [metrics["loss"] * 2 for _, metrics in steps]


def saved_first(trainer: PipelineTrainer, where: Path) -> Any:
    trainer.save(where / "first")
    other = trainer_of()
    other.restore(where / "first")
    return stepped(other)


def resumed(where: Path) -> Any:
    saved = [trainer_of(checkpoints=Checkpoints(where / "saves", every=1)) for _ in range(3)]
    first = saved[0].fit([BATCH], steps=1, eval_data=[BATCH])
    then = saved[1].fit([BATCH], steps=2, resume=True, callbacks=[Replay(every=1)])
    saved[2].restore(1)
    return first, then, saved[2].state


def weights_between(where: Path) -> Any:
    trainer = stepped(trainer_of())
    trainer.export_pretrained(where / "weights")
    first, second = trainer_of(), trainer_of()
    first.load_pretrained(where / "weights")
    second.set_weights(trainer.gather_model())
    second.set_weights(trainer.state.params)
    return stepped(first), stepped(second)


def planned() -> Any:
    trainer = stepped(trainer_of())
    measured = trainer.profile_step(BATCH)
    assert planning.plan(trainer, BATCH, costs=measured).stage_sizes
    assert trainer.planning_step(BATCH).num_microbatches == 2
    return measured.metrics


def quoted() -> Any:
    def make(**options: Any) -> Any:
        return trainer_of(lambda rngs: Layers(rngs=rngs), **options), BATCH

    return planning.quote(make, hardware="h100-sxm", devices=2).best.seconds


def rescheduled(trainer: PipelineTrainer) -> PipelineTrainer:
    trainer.use_schedule("gpipe")
    return stepped(trainer)


def on_one_device(where: Path) -> Any:
    trainer = trainer_of(num_stages=1, checkpoints=Checkpoints(where / "one", every=1))
    return trainer.fit([BATCH], steps=2, eval_data=[BATCH]), weights(trainer.gather_model())


# What a call gives, with trainers that are made outside of the mesh where `made` holds them.
CALLS: dict[str, Callable[[Path], Any]] = {
    "SGD": lambda _: stepped(trainer_of(tx=optax.sgd(0.1))),
    "Adam": lambda _: stepped(trainer_of()),
    "a factory": lambda _: stepped(trainer_of(lambda rngs: Layers(rngs=rngs))),
    "Linen": lambda _: stepped(linen(lambda make: make(jax.random.key(0))), make_batch(4)).gather_variables(),
    "a factory of variables": lambda _: weights(stepped(linen(lambda make: make), make_batch(4)).gather_model()),
    "values before a step": lambda _: trainer_of().state,
    "compile": lambda _: bool(trainer_of().compile(BATCH)),
    "fit, resume, restore": resumed,
    "save": lambda where: saved_first(trainer_of(), where),
    "weights in and out": weights_between,
    "inference alone": lambda _: trainer_of(loss=mean_squares).evaluate([BATCH["x"]]),
    "an average": lambda _: (lambda t: (t.evaluate([BATCH]), t.predict(BATCH), weights(t.gather_model(ema=True))))(
        stepped(averaged())
    ),
    "adapters": lambda where: weights(merge_lora(stepped(adapted()).gather_model())),
    "adapters in files": lambda where: bool(stepped(adapted()).export_pretrained(where / "merged")),
    "generate": lambda _: tokens(trainer_of(GPT(nnx.Rngs(0), num_blocks=2), loss=mean_loss)),
    "verify": lambda _: verify(trainer_of(), BATCH).agrees,
    "plan, profile_step": lambda _: planned(),
    "quote": lambda _: quoted(),
    "use_schedule": lambda _: rescheduled(stepped(trainer_of())),
    "training_steps": lambda _: own_loop(trainer_of()),
    "shapes": lambda _: (lambda t: (t.rows_read(BATCH), t.leaves_read(BATCH), bool(t.step_function(BATCH))))(
        trainer_of()
    ),
    "a copy of a state": lambda _: jax.tree.map(copy.deepcopy, trainer_of().state),
    "one device": on_one_device,
    "verify on one device": lambda _: verify(trainer_of(num_stages=1), BATCH).agrees,
}
FAILED_ON_AUTO_AXES = ("weights in and out", "an average", "adapters", "verify", "a copy of a state", "one device")


def mean_squares(model: Any, x: Any) -> Any:
    return jnp.mean(model(x) ** 2)


def mesh_around(kind: str) -> AbstractContextManager[Any]:
    devices = np.array(jax.devices())
    explicit = AxisType.Explicit
    return {
        "none": nullcontext,
        "explicit": lambda: jax.set_mesh(Mesh(devices[:4], ("x",), axis_types=(explicit,))),
        "auto": lambda: jax.set_mesh(Mesh(devices[:4], ("x",))),
        "another device": lambda: jax.set_mesh(Mesh(devices[7:], ("x",))),
        "the trainer's names": lambda: jax.set_mesh(
            Mesh(devices.reshape(2, 4), ("stage", "data"), axis_types=(explicit, explicit))
        ),
    }[kind]()


def cases() -> list[Any]:
    auto = [("auto", name) if name in FAILED_ON_AUTO_AXES else slow("auto", name) for name in CALLS]
    others = [slow(kind, name) for kind in ("another device", "the trainer's names") for name in CALLS]
    return [*(("explicit", name) for name in CALLS), *auto, *others]


@pytest.mark.parametrize(("kind", "call"), cases())
def test_every_call(kind: str, call: str, tmp_path: Path):
    expected = CALLS[call](tmp_path / "outside")
    with mesh_around(kind):
        found = CALLS[call](tmp_path / "inside")
    found, expected = (jax.tree.map(np.asarray, seen(result)) for result in (found, expected))
    tree_allclose(found, expected, rtol=0, atol=0)


def seen(result: Any) -> Any:
    """A result in plain trees; a trainer's is its state."""
    if isinstance(result, PipelineTrainer):
        return result.state
    return tuple(map(seen, result)) if isinstance(result, tuple) and not hasattr(result, "_fields") else result


def test_data_and_callbacks_see_the_mesh_of_the_caller():
    sizes: list[int] = []

    class Look(Callback):
        def on_step(self, trainer: Any, record: Any) -> None:
            sizes.append(jax.sharding.get_abstract_mesh().size)

    def data() -> Any:
        for _ in range(2):
            sizes.append(jax.sharding.get_abstract_mesh().size)
            yield BATCH

    trainer = trainer_of()
    with mesh_around("explicit"):
        trainer.fit(data(), callbacks=[Look()])
        trainer.evaluate(data())
        for _ in trainer.training_steps(data()):
            sizes.append(jax.sharding.get_abstract_mesh().size)
    assert sizes == [4] * 10


def test_axes_named_by_a_model_on_one_device_are_refused():
    """They would be those of the mesh around the trainer, where nothing of it has an effect."""

    def loss(model: Any, x: Any) -> Any:
        return jnp.mean(jax.lax.with_sharding_constraint(model(x), PartitionSpec("x")) ** 2)

    with jax.set_mesh(Mesh(np.array(jax.devices()[:1]), ("x",))):
        trainer = trainer_of(loss=loss, num_stages=1)
        with pytest.raises(MeshError, match=r"names axes of a mesh, but one stage on one device.*mesh=\{'data'"):
            trainer.train_step(BATCH["x"])
        named = trainer_of(loss=loss, num_stages=1, mesh={"x": 1})
        assert np.isfinite(float(named.train_step(BATCH["x"])["loss"]))
