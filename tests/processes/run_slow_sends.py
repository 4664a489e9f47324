"""Run by `test_overlap.py`: process 0 sends nothing before all its forward tasks have run."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from tests.processes.running import join_run

join_run()

import jax  # noqa: E402
import numpy as np  # noqa: E402

from jaxpp_flax.engine.jit import mpmd_jit_with_loop  # noqa: E402
from jaxpp_flax.engine.runtime.transport.connection import process_connection  # noqa: E402
from jaxpp_flax.schedules import GPipe  # noqa: E402
from tests.engine.toys import chain, gradients  # noqa: E402
from tests.helpers import batch_of, tree_allclose  # noqa: E402
from tests.processes.cases import mesh_of  # noqa: E402

MICROBATCHES = 6
transport = process_connection().transport
send, held = transport.send, list[tuple[Any, Any, Any]]()


def release() -> None:
    """Send all when the last forward task has run."""
    for values, _, _ in held:
        jax.block_until_ready(values)
    print(f"{len(held)} forward tasks have run before the first send", flush=True)
    for values, parcel, tag in held:
        send(values, parcel, tag)


def hold(values: Sequence[jax.Array], parcel: Any, tag: Any) -> None:
    """Return at once, as a transport does whose link is slow; the results that follow are sent at once."""
    if len(held) == MICROBATCHES:
        send(values, parcel, tag)
        return
    held.append((values, parcel, tag))
    if len(held) == MICROBATCHES:
        threading.Thread(target=release).start()


if jax.process_index() == 0:
    transport.send = hold  # type: ignore[method-assign]
batch = batch_of(MICROBATCHES, host=True)
params = jax.tree.map(np.asarray, chain(2))
results = mpmd_jit_with_loop(gradients(GPipe(2)), mesh_of(2, "rows"))(params, batch)
expected = jax.jit(gradients(None))(params, batch)
tree_allclose(jax.tree.map(np.asarray, results), expected)  # all are small, so each process has them
print("the results are right", flush=True)
