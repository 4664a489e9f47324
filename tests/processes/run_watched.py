"""Run by `test_failure.py`: a process that joins a run by JAX's own call, and waits."""

from __future__ import annotations

import time

from tests.processes.running import join_run

join_run()

from jaxpp_flax.processes import process_group  # noqa: E402

group = process_group()
group.watch(10.0)
group.barrier("the start")
print("watched", flush=True)
time.sleep(600.0)
