"""Names of Shardy:MPMD that this package lacks, each with its replacement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxpp_flax.messages import missing_name

__all__ = ["REMEDIES", "explain"]

_RULES = (
    "fragment rules are not here. Write the order as a `jaxpp_flax.schedules.CustomSchedule`, and pass it as "
    "`make_config(pipeline_schedule=)`"
)
REMEDIES: Mapping[str, str] = {
    "FragmentInfo": _RULES,
    "FragmentMergeRule": _RULES,
    "FragmentMergeRules": _RULES,
    "FragmentOrigin": _RULES,
    "FragmentScheduleRule": _RULES,
    "FragmentScheduleRules": _RULES,
    "PipelineSchedule": _RULES,
    "pipeline": _RULES,
    "pipeline_registry": "pass the name of a schedule as `make_config(pipeline_schedule=)`; `PIPELINE_SCHEDULES` has "
    "the names",
    "reduce": "sums over meshes are inferred. Pass its argument itself",
    "broadcast": "an array is sent to each mesh that reads it. Pass its argument itself",
    "Executable": "what `compile` returns runs by itself, and has the analyses of all meshes",
    "make_partitioning_options": "`PartitioningOptions` checks the options, and so does `make_config`",
}


def explain(name: str, known: Sequence[str]) -> str:
    """Return the message for a missing `jaxpp_flax.mpmd.<name>`.

    Example:
      >>> explain("reduce", [])
      'jaxpp_flax.mpmd has no reduce: sums over meshes are inferred. Pass its argument itself.'
      >>> explain("named_tensors", ["named_tensor", "jit"])
      "module 'jaxpp_flax.mpmd' has no attribute 'named_tensors'. Did you mean 'named_tensor'?"
    """
    return missing_name("jaxpp_flax.mpmd", name, REMEDIES, known)
