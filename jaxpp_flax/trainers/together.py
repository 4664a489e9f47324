"""What several processes do together: each loads what it reads, and their training loops end at the same step."""

from __future__ import annotations

from typing import Any

import jax

from jaxpp_flax.engine.coordination import process_group
from jaxpp_flax.engine.mesh import MpmdMesh
from jaxpp_flax.trainers.errors import BatchError

__all__ = ["end_together", "leaves_read"]


def end_together(mesh: MpmdMesh | None, state: Any, step: int) -> None:
    """At the end of a training loop, wait until every process has trained as many steps.

    Raises:
      BatchError: if their numbers of steps differ; one that others wait for ends the run instead.
    """
    if mesh is None or not mesh.jax_mesh.is_multi_process:
        return
    # What others need of this process's last step is sent by then.
    jax.block_until_ready(jax.tree.leaves(state))
    group = process_group()
    why = f"its data ended, or it was stopped, after step {step}. Give every process batches for the same steps"
    steps = [int(text) for text in group.meet_idle("the end of fit", str(step).encode(), why)]
    if len(set(steps)) > 1:
        listing = ", ".join(f"process {index}: {count}" for index, count in enumerate(steps))
        raise BatchError(
            f"the processes trained different numbers of steps ({listing}): data ended earlier on some of them. Give "
            "every process batches for the same steps, or pass `steps=`."
        )


def leaves_read(compiled: Any, batch: Any) -> Any:
    """For each leaf of a batch, whether a stage of this process reads it.

    A process need not load the others: a `jax.ShapeDtypeStruct` of the whole batch's shape and dtype stands in for one.
    The first stage reads inputs and the last one targets, so each of the two loads half; all others load nothing.

    Args:
      compiled: the step, compiled for such a batch.
      batch: a batch, or its shapes.

    Returns:
      A tree like `batch`, of bools.
    """
    read = getattr(compiled, "read_here", None)
    if read is None:  # one stage without a mesh
        return jax.tree.map(lambda _: True, batch)
    (_, microbatches), _ = read
    return microbatches
