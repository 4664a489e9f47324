"""Where a loss that is not finite arose: one forward pass, evaluated equation by equation on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp_flax.engine.ir import Constant, Graph, from_jaxpr
from jaxpp_flax.trainers.loss import read_loss

__all__ = ["CALLS", "diagnose"]


def diagnose(loss_of: Callable[[Any, Any, Any], Any], params: Any, batch: Any, num_microbatches: int) -> str:
    """What to tell the user about a loss that is not finite, in one sentence or two.

    Args:
      loss_of: `(params, microbatch, index)` -> what the user's loss function returns.
      batch: leaves of shape (num_microbatches, microbatch, ...).
    """
    for what, tree in (("parameter", params), ("batch", batch)):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            if not _finite(leaf):
                return f"{what}{jax.tree_util.keystr(path)} holds a value that is not finite before the step begins."
    for index in range(num_microbatches):
        microbatch = jax.tree.map(lambda x, i=index: x[i], batch)
        place = _first_fault(lambda p, x, i=index: read_loss(loss_of(p, x, i)).total, params, microbatch)
        if place is not None:
            return f"In microbatch {index}, {place}."
    return (
        "Each microbatch's loss is finite when it is computed alone: the sum over the microbatches, or their weight, "
        "is not."
    )


def _first_fault(function: Callable[[Any, Any], Any], params: Any, microbatch: Any) -> str | None:
    graph, consts = from_jaxpr(jax.make_jaxpr(function)(params, microbatch))
    watch = _Watch()
    (loss,) = watch.run(graph, [*consts, *jax.tree.leaves((params, microbatch))])
    if _finite(loss):
        return None
    origin = f"; the first NaN comes from `{watch.first_nan[0]}` at {watch.first_nan[1]}" if watch.first_nan else ""
    if watch.first_block is not None:
        return f"the first block whose output is not finite is {watch.first_block!r}{origin}"
    where = f"after the last mark ({watch.last_block!r})" if watch.last_block else "in a model without marks"
    return f"every marked block's output is finite and the loss is not: it arises {where}, in the head or loss{origin}"


class _Watch:
    """Evaluates graphs, entering calls that hold marks, and remembers where values stopped being finite."""

    def __init__(self) -> None:
        self.first_block: str | None = None
        self.last_block: str | None = None
        self.first_nan: tuple[str, str] | None = None

    def run(self, graph: Graph, operands: list[Any]) -> list[Any]:
        environment: dict[Any, Any] = dict(zip(graph.inputs, operands, strict=True))

        def read(atom: Any) -> Any:
            return atom.value if isinstance(atom, Constant) else environment[atom]

        for equation in graph.equations:
            inputs = [read(atom) for atom in equation.inputs]
            inner = next((equation.params[k] for k in ("jaxpr", "call_jaxpr") if k in equation.params), None)
            if equation.name in CALLS and inner is not None:
                body, consts = from_jaxpr(inner)
                results = self.run(body, [*consts, *inputs])
            else:
                results = equation.bind(*inputs)
                if self.first_nan is None and any(map(_has_nan, results)) and not any(map(_has_nan, inputs)):
                    self.first_nan = (equation.name, equation.where)
            if equation.name == "stage_marker":
                self.last_block = equation.params["name"] or "an unnamed mark"
                if self.first_block is None and not all(map(_finite, results)):
                    self.first_block = self.last_block
            environment.update(zip(equation.outputs, results, strict=True))
        return [read(atom) for atom in graph.outputs]


CALLS = {"jit", "pjit", "remat", "remat2", "checkpoint", "closed_call", "core_call", "custom_jvp_call"} | {
    "custom_vjp_call",
    "custom_vjp_call_jaxpr",
}


def _is_float(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating)


def _finite(leaf: Any) -> bool:
    return not _is_float(leaf) or bool(np.isfinite(np.asarray(leaf, np.float32)).all())


def _has_nan(leaf: Any) -> bool:
    return _is_float(leaf) and bool(np.isnan(np.asarray(leaf, np.float32)).any())
