"""Refuse arrays typed as partial sums (`PartitionSpec(unreduced=...)`): this part of a type is lost between tasks."""

from __future__ import annotations

from jaxpp_flax.engine.tracing.ir import Graph

__all__ = ["refuse_partial_sums"]


def refuse_partial_sums(graph: Graph) -> None:
    """Check that no equation of the graph makes a partial sum.

    Raises:
      NotImplementedError: naming the equation, the type and the remedy.
    """
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
