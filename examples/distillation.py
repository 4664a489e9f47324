"""Trains a small student from a large, frozen teacher: both are pipelined, and only the student has an optimizer.

    python examples/distillation.py

Teacher and student are parts of one module, so the stages hold both: blocks of the teacher, then those of the student.
A frozen parameter has no gradient, no accumulator and no optimizer state.

At real size: a frozen teacher of 70 billion parameters in bfloat16 is 140 GB, and a student of 7 billion under AdamW
112 GB; the teacher's forward is about as much work as three steps of the student.
"""

from __future__ import annotations

import argparse

import jax
import numpy as np
import optax
from flax import nnx

from jaxpp_flax import PipelineStage, PipelineTrainer
from jaxpp_flax.trainers import Logging, Training

FEATURES, CLASSES, TEMPERATURE = 16, 8, 2.0


class Block(nnx.Module):
    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.linear = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jax.nn.gelu(self.linear(self.norm(x)))


class Classifier(nnx.Module):
    def __init__(self, name: str, width: int, blocks: int, *, rngs: nnx.Rngs):
        self.widen = nnx.Linear(FEATURES, width, rngs=rngs)
        self.blocks = nnx.List([PipelineStage(Block(width, rngs=rngs), name=f"{name}_{i}") for i in range(blocks)])
        self.head = nnx.Linear(width, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.widen(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_teacher(rngs: nnx.Rngs) -> Classifier:
    return Classifier("teacher", 96, 4, rngs=rngs)


class Distillation(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.teacher = make_teacher(rngs)
        self.student = Classifier("student", 16, 2, rngs=rngs)


def teach(model: Classifier, batch: dict[str, jax.Array]) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["label"]).mean()


def distil(model: Distillation, batch: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
    """How far the student's probabilities are from the teacher's; labels are used by the metrics alone."""
    taught, learnt = model.teacher(batch["x"]), model.student(batch["x"])
    target = jax.nn.softmax(jax.lax.stop_gradient(taught) / TEMPERATURE)
    loss = TEMPERATURE**2 * optax.softmax_cross_entropy(learnt / TEMPERATURE, target).mean()
    hits = {"teacher": taught.argmax(-1) == batch["label"], "student": learnt.argmax(-1) == batch["label"]}
    return loss, {name: hit.mean() for name, hit in hits.items()}


def make_batch(rng: np.random.Generator, size: int = 128) -> dict[str, np.ndarray]:
    """Points, and the class whose direction fits best to their distances from zero."""
    x = rng.normal(size=(size, FEATURES)).astype(np.float32)
    directions = np.random.default_rng(0).normal(size=(FEATURES, CLASSES))
    return {"x": x, "label": (np.abs(x) @ directions).argmax(-1).astype(np.int32)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500, help="of teacher and student, each")
    steps = parser.parse_args().steps
    if not jax.distributed.is_initialized():  # of several processes, the launcher knows the devices
        jax.config.update("jax_num_cpu_devices", 4)  # takes effect on CPU alone
    rng = np.random.default_rng(1)
    common = {"num_microbatches": 4, "logging": Logging(every=100)}

    teacher = PipelineTrainer(make_teacher, optax.adam(2e-3), teach, num_stages=4, mesh={}, **common)
    teacher.fit((make_batch(rng) for _ in range(steps)), steps=steps)

    student = PipelineTrainer(
        lambda rngs: Distillation(rngs=rngs), optax.adam(4e-3), distil, num_stages=3, mesh={},
        training=Training(frozen="teacher"), **common,
    )  # fmt: skip
    start = Distillation(rngs=nnx.Rngs(1))
    start.teacher = teacher.gather_model()
    student.set_weights(start)
    student.fit((make_batch(rng) for _ in range(steps)), steps=steps)
    scores = student.evaluate([make_batch(rng, 1024)])
    print(f"held-out accuracy: teacher {scores['teacher']:.2f}, student {scores['student']:.2f}")


if __name__ == "__main__":
    main()
