"""`distributed_main`, which starts JaxPP's examples: `import jaxpp_flax.api.distributed_utils as jppdu`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import jax

__all__ = ["distributed_main"]

# JaxPP's launch script sets these for each process.
_VARIABLES = ("JAX_COORDINATOR_IP", "JAX_COORDINATOR_PORT", "NNODES", "NODE_RANK")


def distributed_main(fn: Callable[[], Any]) -> None:
    """Run `fn` in this process, in a run of one or several processes.

    JaxPP's launch script sets `JAX_COORDINATOR_IP`, `JAX_COORDINATOR_PORT`, `NNODES` and `NODE_RANK`. If they are set,
    JAX's distributed runtime is started from them first and shut down at the end; `N_GPUS`, if set, is the number of
    this process's devices. Without these variables, `fn` runs in this process alone.

    Raises:
      ValueError: if only some of the four are set.

    Example:
      >>> distributed_main(lambda: print("in one process"))
      in one process
    """
    settings = _settings(os.environ)
    if settings is None:
        fn()
        return
    jax.distributed.initialize(**settings)
    try:
        fn()
    finally:
        jax.distributed.shutdown()


def _settings(environment: Mapping[str, str]) -> dict[str, Any] | None:
    given = [name for name in _VARIABLES if name in environment]
    if not given:
        return None
    if len(given) < len(_VARIABLES):
        lacking = [name for name in _VARIABLES if name not in environment]
        raise ValueError(
            f"distributed_main found {given} in the environment, but not {lacking}. Set all of {list(_VARIABLES)} for "
            "a run of several processes, or none of them for one process."
        )
    address, port, count, rank = (environment[name] for name in _VARIABLES)
    settings: dict[str, Any] = {
        "coordinator_address": f"{address}:{port}",
        "num_processes": int(count),
        "process_id": int(rank),
    }
    if "N_GPUS" in environment:
        settings["local_device_ids"] = list(range(int(environment["N_GPUS"])))
    return settings
