"""Run by `engine/runtime/transport/test_credits.py`: a loop of forwards alone, one process for each rank."""

from __future__ import annotations

import functools
import sys
import time
from pathlib import Path
from typing import Any

from tests.processes.running import join_run

join_run()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from jaxpp_flax import MpmdMesh, mark_stage_end, mpmd_jit_with_loop, treduce  # noqa: E402
from jaxpp_flax.engine.program.waits import AHEAD  # noqa: E402
from jaxpp_flax.engine.runtime.transport.connection import process_connection  # noqa: E402
from jaxpp_flax.engine.tracing.treduce import Add  # noqa: E402
from jaxpp_flax.schedules import GPipe  # noqa: E402
from jaxpp_flax.trainers.step.microbatch_loop import ForwardOnly  # noqa: E402

MICROBATCHES = 40
me, taken = jax.process_index(), Path(sys.argv[1]) / "taken"  # a byte for each parcel that process 1 has asked for
mesh = MpmdMesh(jax.sharding.Mesh(np.array(jax.devices()), ("stage",)), "stage")
connection = process_connection()
transport: Any = connection.transport
ahead: list[int] = []


def step(w: Any, batch: Any) -> Any:
    def body(x: Any) -> Any:
        for part in w[:-1]:
            x = mark_stage_end(jnp.sin(x @ part))
        return jnp.sum(jnp.sin(x @ w[-1]))

    return treduce(body, batch, ForwardOnly(GPipe(len(w))), operation=Add)


w, batch = [np.eye(4, dtype=np.float32)] * jax.process_count(), np.ones((MICROBATCHES, 2, 4), np.float32)
function = mpmd_jit_with_loop(step, mesh)
analysis = function.compile(w, batch).memory_analysis()
assert analysis[0].peak_bytes == (AHEAD + 1) * batch[0].nbytes, "what is in flight, and what is computed meanwhile"
taken.touch()
connection.group.barrier("the file", 60.0)

send, recv = transport.send, transport.recv


def noted_send(values: Any, parcel: Any, tag: Any) -> None:
    if me == 0:
        ahead.append(len(ahead) + 1 - taken.stat().st_size)
    send(values, parcel, tag)


def slow_recv(parcel: Any, tag: Any) -> Any:
    if me == 1 and parcel.source == 0:
        time.sleep(0.01)
        with taken.open("ab") as file:
            file.write(b".")
    return recv(parcel, tag)


transport.send, transport.recv = noted_send, slow_recv
for call in range(2):
    result = function(w, batch)
    if me == len(w) - 1:
        one = functools.reduce(lambda x, _: np.sin(x), w, 1.0)
        np.testing.assert_allclose(float(np.asarray(result)), MICROBATCHES * 8 * one, rtol=1e-5)
    connection.group.barrier(f"call {call}", 60.0)
if me == 0:
    assert len(ahead) == 2 * MICROBATCHES, len(ahead)
    print("at most", max(ahead))
print("good")
