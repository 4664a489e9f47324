"""Find what a loss's call writes into the model, and on what each written value depends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jaxpp_flax.engine.analyses.inner_bodies import Scan, open_scan
from jaxpp_flax.engine.tracing.ir import Graph, Value, from_jaxpr
from jaxpp_flax.engine.tracing.primitives import facts_of

__all__ = ["NO_WRITES", "Origin", "Writes", "find_writes", "origins"]


@dataclass(frozen=True, kw_only=True)
class Writes:
    """The leaves that a call writes, by their positions in the rest of the model's state, or in its parameters.

    Args:
      carried: leaves of the rest that go from microbatch to microbatch.
      once: leaves of the rest that get the same value in each microbatch, if each begins with the value before the
        step, as in plain Flax: functions of parameters, such as the vectors of a spectral norm or a teacher's average.
      params: trained parameters.
      varying: those of `params` whose written value depends on the microbatch.
    """

    carried: tuple[int, ...] = ()
    once: tuple[int, ...] = ()
    params: tuple[int, ...] = ()
    varying: tuple[int, ...] = ()


NO_WRITES = Writes()


def find_writes(graph: Graph, num_constants: int, frozen: Sequence[bool], num_params: int) -> Writes:
    """Find the writes in the trace of a loss.

    Args:
      graph: the trace. Its inputs are constants, the leaves of the rest, the parameters, and what varies between
        microbatches; its outputs begin with the rest after the call, and end with the parameters after it.
      num_constants: how many of the inputs are constants.
      frozen: for each leaf of the rest, True if it is a parameter.
      num_params: the number of trained parameters.
    """
    num_rest, varies = len(frozen), 1 << len(frozen) + num_params
    num_leaves, num_varying = num_rest + num_params, len(graph.inputs) - num_constants - len(frozen) - num_params
    leaves = [Origin(reads=1 << i, same_as=i) for i in range(num_leaves)]
    inputs = [*[Origin()] * num_constants, *leaves, *[Origin(reads=varies)] * num_varying]
    results = origins(graph, inputs)
    after = [*results[:num_rest], *results[len(results) - num_params :]]
    written = [i for i, origin in enumerate(after) if origin.same_as != i]
    reads = [origin.reads for origin in after]
    states = [i for i in written if i < num_rest]
    moving = _moving(states, reads, varies)
    parameters = [i for i in range(num_leaves) if i >= num_rest or frozen[i]]
    still = {i for i in written if not reads[i] & (varies | moving)}
    once = {i for i in still if i in parameters or reads[i] & _bits(parameters)}
    while more := {i for i in still if any(reads[j] >> i & 1 for j in once)} - once:  # what these are computed of
        once |= more
    return Writes(
        carried=tuple(i for i in states if i not in once),
        once=tuple(i for i in states if i in once),
        params=tuple(i - num_rest for i in written if i >= num_rest),
        varying=tuple(i - num_rest for i in written if i >= num_rest and i not in once),
    )


def _moving(states: Sequence[int], reads: Sequence[int], varies: int) -> int:
    """Return the bits of the written leaves that depend on the microbatch, or on another such leaf."""
    moving, known = 0, -1
    while moving != known:
        known = moving
        moving = _bits(i for i in states if reads[i] & (varies | known))
    return moving


def _bits(numbers: Iterable[int]) -> int:
    return sum(1 << number for number in numbers)


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What a value is made of: the inputs that it depends on, as a set of bits, and the input that it is a copy of."""

    reads: int = 0
    same_as: int | None = None


def origins(graph: Graph, inputs: Sequence[Origin]) -> list[Origin]:
    """Return the origin of each output; `inputs` has those of the inputs.

    Calls and scans are entered; each result of another loop or of a condition depends on all of its inputs.
    """
    known = dict(zip(graph.inputs, inputs, strict=True))

    def of(atom: object) -> Origin:
        return known[atom] if isinstance(atom, Value) else Origin()

    for equation in graph.equations:
        operands = [of(atom) for atom in equation.inputs]
        if (called := facts_of(equation.primitive).body_in(equation.params)) is not None:
            body, constants = from_jaxpr(called)
            results = origins(body, [*[Origin()] * len(constants), *operands])
        elif equation.name == "scan":
            results = _of_scan(open_scan(equation), [operand.reads for operand in operands])
        else:
            results = [Origin(reads=_union(operand.reads for operand in operands))] * len(equation.outputs)
        known.update(zip(equation.outputs, results, strict=True))
    return [of(atom) for atom in graph.outputs]


def _of_scan(scan: Scan, operands: Sequence[int]) -> list[Origin]:
    """Return the origins of the results of a scan: the carry collects what its rounds read."""
    first, second = scan.num_consts, scan.num_consts + scan.num_carry
    carry, known = list(operands[first:second]), None
    results: list[int] = []
    while carry != known:
        known = carry
        inputs = [Origin(reads=reads) for reads in (*operands[:first], *carry, *operands[second:])]
        results = [origin.reads for origin in origins(scan.body, inputs)]
        carry = [before | after for before, after in zip(carry, results, strict=False)]
    return [Origin(reads=reads) for reads in (*carry, *results[scan.num_carry :])]


def _union(marks: Iterable[int]) -> int:
    union = 0
    for mark in marks:
        union |= mark
    return union
