"""Two different models on two meshes that exchange data: a teacher on one labels batches for a student on the other.

The teacher is a wide network whose weights are fixed; the student, a narrow one, learns its outputs. The teacher's
mesh has two devices, the student's one. In each step the teacher labels the batch of the next step while the student
learns from the last one, so that the meshes work side by side; the labels are all that crosses over.

    python examples/mpmd/teacher_and_student.py --steps 200

As two processes, with the teacher in one and the student in the other:

    python -m jaxpp_flax.launch -n 2 --devices-per-process 2 examples/mpmd/teacher_and_student.py
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=3")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec

from jaxpp_flax import mpmd

FEATURES, TEACHER_WIDTH, STUDENT_WIDTH, LABELS, ROWS = 16, 256, 32, 4, 64


def init(key: jax.Array, width: int) -> dict[str, jax.Array]:
    first, second = jax.random.split(key)
    return {
        "in": jax.random.normal(first, (FEATURES, width)) / FEATURES**0.5,
        "out": jax.random.normal(second, (width, LABELS)) / width**0.5,
    }


def network(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ params["in"]) @ params["out"]


optimizer = optax.adam(1e-2)


def step(teacher, student, state, batch, labels, next_batch):
    """The student's step on a batch whose labels are known, and the labels of the next batch."""
    next_labels = mpmd.named_computation(network, name="teacher")(teacher, next_batch)

    def loss_fn(student):
        predicted = mpmd.named_computation(network, name="student")(student, batch)
        return jnp.mean((predicted - labels) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(student)
    updates, state = optimizer.update(grads, state, student)
    return optax.apply_updates(student, updates), state, next_labels, loss


def main(steps: int) -> list[float]:
    devices = np.array(jax.devices())
    topology = {"large": Mesh(devices[:2], ("data",)), "small": Mesh(devices[2:3], ("data",))}
    # The labels, named here as a result, leave for the student's mesh as soon as they are made.
    config = mpmd.make_config(
        topology,
        {"teacher": "large", "student": "small"},
        output_mesh_assignment=(None, None, "small", None),
    )
    teacher, student = init(jax.random.key(0), TEACHER_WIDTH), init(jax.random.key(1), STUDENT_WIDTH)
    state = optimizer.init(student)
    batches = [jax.random.normal(jax.random.key(10 + i), (ROWS, FEATURES)) for i in range(8)]
    labels = network(teacher, batches[0])

    rows = PartitionSpec("data")
    distil = mpmd.jit(step, config, in_shardings=(None, None, None, None, None, rows))
    lowered = distil.lower(teacher, student, state, batches[0], labels, batches[1])
    print(f"a step sends {lowered.transferred_bytes} bytes from mesh to mesh (the labels have {labels.nbytes})")
    compiled = lowered.compile()
    losses: list[float] = []
    for number in range(steps):
        batch, next_batch = batches[number % 8], batches[(number + 1) % 8]
        student, state, labels, loss = compiled(teacher, student, state, batch, labels, next_batch)
        if not loss.is_fully_addressable:  # the student is in another process
            continue
        losses.append(float(loss))
        if number % 50 == 0 or number == steps - 1:
            print(f"step {number:4}  loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    main(parser.parse_args().steps)
