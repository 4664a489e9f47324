"""Requests for a kind of memory inside of a traced step: those that would be lost are refused before anything runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.extend import source_info_util
from jax.sharding import NamedSharding, Sharding

from jaxpp_flax.engine.arrays.memory_kinds import check_devices, check_kind, memory_wanted
from jaxpp_flax.engine.tracing.ir import Graph, inside, memory_kind_of
from jaxpp_flax.engine.tracing.rewriting import part_of

__all__ = ["check_memory_requests"]


def check_memory_requests(graph: Graph, devices: Iterable[Any]) -> None:
    """Refuse what would change the memory of a value without a word, or what the devices cannot do.

    Args:
      graph: the traced step.
      devices: those that run it.

    Raises:
      ValueError: for a sharding constraint that names another memory than the value's; for a `jax.device_put`, or a
        policy of `jax.checkpoint`, to a kind that types do not know; for a `jax.device_put` to the host memory of one
        device; for host memory that a device lacks. The message names the user's line.
    """
    known = list(devices)
    for value in graph.inputs:
        check_devices(memory_kind_of(value.aval), known, f"an argument, {value.aval.str_short()},")
    _check_policies(list(_everywhere(graph)))
    for equation in _everywhere(graph):
        name = equation.primitive.name
        if name == "sharding_constraint":
            _check_constraint(equation, _where(equation))
        elif name == "device_put":
            _check_device_put(equation, _where(equation))
        for value in part_of(equation, "outputs"):
            if (kind := memory_kind_of(value.aval)) is not None:
                check_devices(kind, known, f"the `{name}` at {_where(equation)}")


def _everywhere(graph: Graph) -> Iterator[Any]:
    for equation in graph.equations:
        yield equation
        yield from inside(equation.params)
        for inner in equation.params.values():  # the body of a loop over microbatches
            if isinstance(inner, Graph):
                yield from _everywhere(inner)


def _where(equation: Any) -> str:
    source = part_of(equation, "source")
    return (source_info_util.summarize(source) if source is not None else "") or "unknown"


def _check_policies(equations: Sequence[Any]) -> None:
    """Refuse a policy that offloads to an unknown kind of memory: JAX writes a copy to device memory instead."""
    policies = {id(p): p for e in equations if callable(p := e.params.get("policy"))}
    makers = {id(value): e for e in equations if policies for value in part_of(e, "outputs")}
    for equation in equations if policies else ():
        if equation.primitive.name != "device_put" or set(equation.params["devices"]) != {jax.memory.Space.Device}:
            continue
        if (maker := makers.get(id(part_of(equation, "inputs")[0]))) is None:
            continue
        avals = [atom.aval for atom in part_of(maker, "inputs")]
        for policy in policies.values():
            kind = getattr(policy(maker.primitive, *avals, **maker.params), "dst", None)
            if kind is not None:
                name = maker.primitive.name
                check_kind(kind, f"the offload of the `{name}` at {_where(maker)}, by a `jax.checkpoint` policy,")


def _check_constraint(equation: Any, where: str) -> None:
    kind = memory_wanted(equation.params["sharding"], f"the constraint at {where}")
    there = memory_kind_of(part_of(equation, "inputs")[0].aval) or "device"
    if kind not in (None, "device", there):
        raise ValueError(
            f"the sharding constraint at {where} names the memory kind {kind!r}, but the value lies in {there!r} "
            "memory, and a constraint moves no value to another memory: JAX would drop the kind. Write "
            "`jax.device_put(x, jax.memory.Space.Host)` there, and constrain the partition without a memory kind."
        )


def _check_device_put(equation: Any, where: str) -> None:
    for target in equation.params["devices"]:
        if not isinstance(target, Sharding):
            continue
        kind = memory_wanted(target, f"the `jax.device_put` at {where}")
        if kind not in (None, "device") and not isinstance(target, NamedSharding):
            raise ValueError(
                f"the `jax.device_put` at {where} names the {kind!r} memory of one device, {target}, but a task runs "
                "on all devices of its rank. Write `jax.device_put(x, jax.memory.Space.Host)`: each device's part then "
                "goes to its own host memory."
            )
