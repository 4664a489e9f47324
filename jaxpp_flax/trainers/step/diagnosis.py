"""Find the origin of a loss that is not finite: evaluate one forward pass, equation by equation, on one device.

With several processes, each process has only the batch leaves that its stages read, and evaluates the equations that
need no other leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.engine.tracing.ir import Constant, Graph, from_jaxpr
from jaxpp_flax.engine.tracing.primitives import facts_of
from jaxpp_flax.processes import exchange_values, process_group
from jaxpp_flax.trainers.errors import NonFiniteLossError
from jaxpp_flax.trainers.model.adapter import ModelAdapter
from jaxpp_flax.trainers.model.calling import call_function
from jaxpp_flax.trainers.step.loss import read_loss


def first_loss_error(
    value: float,
    initial: tuple[Any, Any] | None,
    model: ModelAdapter,
    loss_fn: Callable[..., Any],
    batch: Any,
    num_microbatches: int,
    mesh: MpmdMesh | None,
) -> NonFiniteLossError:
    """Return the error for a loss of step 1 that is not finite: `value`.

    `initial` has the parameters and the rest of the model's state before that step; None if they were not kept.
    """
    if initial is None:
        return NonFiniteLossError(
            f"the loss of step 1 is {value}. Parameters of this size are not kept to find out where it arose: run "
            "the loss function on one microbatch under `jax.debug_nans(True)`. Check the data and the initial "
            "parameters, and operations such as log, division and square root of zero."
        )
    params, rest = initial

    def loss_of(params: Any, microbatch: Any, index: int) -> Any:
        return call_function(loss_fn, model, params, rest, microbatch, step=0, microbatch=index, training=True)[0]

    origin = diagnose(loss_of, params, batch, num_microbatches, mesh=mesh)
    return NonFiniteLossError(
        f"the loss of step 1 is {value}. {origin} Check the data and the initial parameters there, and operations "
        "such as log, division and square root of zero; a lower learning rate does not change the first loss."
    )


# A value that only other processes can compute; this process treats it as finite.
_UNKNOWN = object()

# Kinds of findings, the most precise first: with several processes, the most precise finding is used.
_A_LEAF, _A_BLOCK, _AFTER_THE_BLOCKS, _BEYOND_THE_BLOCKS, _THE_SUM, _NOTHING = range(6)


def diagnose(
    loss_of: Callable[[Any, Any, Any], Any],
    params: Any,
    batch: Any,
    num_microbatches: int,
    *,
    mesh: MpmdMesh | None = None,
) -> str:
    """Describe the origin of a loss that is not finite to the user, in one sentence or two.

    If several processes own the mesh, all of them must call `diagnose`, and all return the most precise finding.
    `loss_of(params, microbatch, index)` returns the result of the user's loss function. `batch` has leaves of shape
    (num_microbatches, microbatch, ...), and a `jax.ShapeDtypeStruct` for a leaf that only another process has.
    """
    findings = [_find(loss_of, params, batch, num_microbatches)]
    if mesh is not None and mesh.jax_mesh.is_multi_process:
        findings = exchange_values(process_group(), "where the loss is not finite", findings[0])
    process = min(range(len(findings)), key=lambda index: (findings[index][0], index))
    text = findings[process][1]
    return f"Process {process} finds: {text[0].lower()}{text[1:]}" if len(findings) > 1 else text


def _find(loss_of: Callable[[Any, Any, Any], Any], params: Any, batch: Any, num_microbatches: int) -> tuple[int, str]:
    absent: list[str] = []
    for what, tree in (("parameter", params), ("batch", batch)):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            name = f"{what}{jax.tree_util.keystr(path)}"
            if _is_elsewhere(leaf):
                absent.append(name)
            elif not _finite(leaf):
                return _A_LEAF, f"{name} holds a value that is not finite before the step begins."
    found = (
        _THE_SUM,
        "Each microbatch's loss is finite when it is computed alone: the sum over the microbatches, or their weight, "
        "is not.",
    )
    for index in range(num_microbatches):
        microbatch = jax.tree.map(
            lambda x, i=index: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) if _is_elsewhere(x) else x[i], batch
        )
        fault = _first_fault(lambda p, x, i=index: read_loss(loss_of(p, x, i)).total, params, microbatch)
        if fault is None:
            continue
        what, place = fault
        if what <= _AFTER_THE_BLOCKS:
            return what, f"In microbatch {index}, {place}."
        found = what, f"{place}; {', '.join(absent)}, which it reads, is not in this process."
    return found


def _is_elsewhere(leaf: Any) -> bool:
    """Return True if this process does not have the whole leaf."""
    return isinstance(leaf, jax.ShapeDtypeStruct) or not getattr(leaf, "is_fully_addressable", True)


def _first_fault(function: Callable[[Any, Any], Any], params: Any, microbatch: Any) -> tuple[int, str] | None:
    graph, consts = from_jaxpr(jax.make_jaxpr(function)(params, microbatch))
    watch = _Watch()
    operands = [_UNKNOWN if _is_elsewhere(leaf) else leaf for leaf in jax.tree.leaves((params, microbatch))]
    (loss,) = watch.run(graph, [*consts, *operands])
    if loss is not _UNKNOWN and _finite(loss):
        return None
    origin = f"; the first NaN comes from `{watch.first_nan[0]}` at {watch.first_nan[1]}" if watch.first_nan else ""
    if watch.first_block is not None:
        return _A_BLOCK, f"the first block whose output is not finite is {watch.first_block!r}{origin}"
    if watch.unknown_block is not None:
        return _NOTHING, f"It cannot be computed up to the block {watch.unknown_block!r}"
    where = f"after the last mark ({watch.last_block!r})" if watch.last_block else "in a model without marks"
    place = f"it arises {where}, in the head or loss{origin}"
    if loss is _UNKNOWN:
        return _BEYOND_THE_BLOCKS, f"Every marked block's output is finite: {place}"
    return _AFTER_THE_BLOCKS, f"every marked block's output is finite and the loss is not: {place}"


class _Watch:
    """Evaluates graphs and the calls in them, and remembers the first values that are not finite."""

    def __init__(self) -> None:
        self.first_block: str | None = None
        self.last_block: str | None = None
        self.unknown_block: str | None = None
        self.first_nan: tuple[str, str] | None = None

    def run(self, graph: Graph, operands: list[Any]) -> list[Any]:
        environment: dict[Any, Any] = dict(zip(graph.inputs, operands, strict=True))

        def read(atom: Any) -> Any:
            return atom.value if isinstance(atom, Constant) else environment[atom]

        for equation in graph.equations:
            inputs = [read(atom) for atom in equation.inputs]
            if (called := facts_of(equation.primitive).body_in(equation.params)) is not None:
                body, consts = from_jaxpr(called)
                results = self.run(body, [*consts, *inputs])
            elif any(value is _UNKNOWN for value in inputs):
                results = [_UNKNOWN] * len(equation.outputs)
            else:
                results = equation.bind(*inputs)
                if self.first_nan is None and any(map(_has_nan, results)) and not any(map(_has_nan, inputs)):
                    self.first_nan = (equation.name, equation.where)
            if equation.name == "stage_marker":
                self.last_block = equation.params["name"] or "an unnamed mark"
                if self.first_block is None and not all(map(_finite, results)):
                    self.first_block = self.last_block
                if self.unknown_block is None and any(value is _UNKNOWN for value in results):
                    self.unknown_block = self.last_block
            environment.update(zip(equation.outputs, results, strict=True))
        return [read(atom) for atom in graph.outputs]


def _is_float(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating)


def _finite(leaf: Any) -> bool:
    return not _is_float(leaf) or bool(np.isfinite(np.asarray(leaf, np.float32)).all())


def _has_nan(leaf: Any) -> bool:
    return _is_float(leaf) and bool(np.isnan(np.asarray(leaf, np.float32)).any())
