"""Refuse steps that no pipeline can run: with ordered side effects, or with types of partial sums."""

from __future__ import annotations

from jaxpp_flax._compat import is_ordered
from jaxpp_flax.engine.tracing.ir import Graph
from jaxpp_flax.engine.tracing.treduce import treduce_p

__all__ = ["check_supported", "refuse_ordered_effects"]


def check_supported(graph: Graph) -> None:
    """Check a step, or the body of its loop.

    Raises:
      NotImplementedError: if a value is typed as a partial sum.
      ValueError: if a side effect has `ordered=True`.
    """
    _refuse_partial_sums(graph)
    refuse_ordered_effects(graph)


def refuse_ordered_effects(graph: Graph) -> None:
    """Refuse ordered effects: stages run at the same time, so there is no order over the whole step."""
    for equation in graph.equations:
        if equation.primitive is treduce_p:
            refuse_ordered_effects(equation.params["body"])
            continue
        if any(map(is_ordered, equation.effects)):
            raise ValueError(
                f"the `{equation.name}` at {equation.where} has a side effect with ordered=True, but the stages of a "
                "pipeline work on several microbatches at the same time, so that no order of the whole step "
                "is kept. Leave out ordered=True: each call still happens once for each microbatch. Pass what "
                "tells the calls apart (the microbatch's index, the layer's name) to the callback."
            )


def _refuse_partial_sums(graph: Graph) -> None:
    """Refuse arrays typed as partial sums (`unreduced=`): this part of a type is lost between tasks."""
    for equation in graph.equations:
        for value in equation.outputs:
            axes = getattr(getattr(value.aval.sharding, "spec", None), "unreduced", None)
            if axes:
                what = value.aval.str_short(short_dtypes=True)
                raise NotImplementedError(
                    f"`{equation.name}` at {equation.where} gives {what}, whose type keeps partial sums over "
                    f"{sorted(axes)} (`unreduced=`). A pipeline cannot hand such values from task to task, and needs "
                    "none: gradients of parameters that are replicated over a data axis are reduced once, after the "
                    "loop, without being told. Drop `reduced=` and `unreduced=` from the step, with the `reshard` "
                    "behind the loop."
                )
