"""JaxPP's environment variables, none of which has an effect here: each that is set is named in a warning."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping

__all__ = ["warn_of_variables"]

_OWN = "JAXPP_FLAX_"

_REMEDIES: Mapping[str, str] = {
    "JAXPP_CONSERVATIVE_LOOP_CLUSTERING": "work that no stage claims goes to a stage that reads it",
    "JAXPP_DEBUG_FORCE_MPMDIFY": "one process runs all of its ranks as it does with several processes",
    "JAXPP_DEBUG_SKIP_PROPAGATION": "call `.trace_and_place(*args)`, which compiles nothing",
    "JAXPP_DIRECTIONAL_COMMUNICATORS": "JAXPP_FLAX_TRANSPORT chooses how processes send arrays",
    "JAXPP_DISABLE_PREVENT_CSE": "pass `prevent_cse=False` to `jax.checkpoint`",
    "JAXPP_DISABLE_SCHEDULE_TASK_FUSION": "pass a schedule without fused tasks, e.g. `fuse_steady_state=False`",
    "JAXPP_DUMP_DIR": "set JAXPP_FLAX_DUMP to a folder",
    "JAXPP_ENABLE_CHECK_JAXPR": "set JAXPP_FLAX_VERIFY=1",
    "JAXPP_ENABLE_LICM": "compute outside of the loop what does not change in it",
    "JAXPP_ENABLE_LOCAL_PROPAGATION": "partitions are always found task by task",
    "JAXPP_FAST_INFER_SHARDINGS": "partitions are always found task by task",
    "JAXPP_SHARE_DONATION": "a task donates what its every run may donate",
    "JAXPP_TRANSFER_DONE_DELAY": "a sent array is freed as soon as it has been read",
}


def warn_of_variables(environment: Mapping[str, str] = os.environ) -> None:
    """Warn of each variable of JaxPP's that is set; Python's usual filter tells each once.

    Example:
      >>> with warnings.catch_warnings(record=True, action="always") as told:
      ...     warn_of_variables({"JAXPP_DUMP_DIR": "/tmp/dump", "JAXPP_FLAX_DUMP": "/tmp/ours"})
      >>> [str(warning.message) for warning in told]
      ["JAXPP_DUMP_DIR='/tmp/dump' has no effect in jaxpp_flax: set JAXPP_FLAX_DUMP to a folder."]
    """
    for name in sorted(environment):
        if name.startswith("JAXPP_") and not name.startswith(_OWN):
            remedy = _REMEDIES.get(name, "`docs/reference/jaxpp_names.md` lists the variables of JaxPP")
            warnings.warn(f"{name}={environment[name]!r} has no effect in jaxpp_flax: {remedy}.", stacklevel=1)
