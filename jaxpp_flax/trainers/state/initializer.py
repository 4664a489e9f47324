"""Make a model's first values leaf by leaf, from the traced program of its construction.

The values are bit for bit those of the ordinary eager construction. Eager JAX compiles each operation, and each jitted
function such as `jax.random.normal`, as a program of its own. One program for a whole model would be another one: XLA
multiplies constants of neighbouring operations, and a normal initialiser then differs in the last bit. So each equation
of the trace is compiled alone here too, and equal equations are compiled once.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxpp_flax.engine.arrays.ambient_mesh import context_mesh
from jaxpp_flax.engine.arrays.mesh import MpmdSharding
from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray
from jaxpp_flax.engine.arrays.placing import place
from jaxpp_flax.engine.program.description import describe_graph
from jaxpp_flax.engine.tracing.fingerprint import Fingerprinter
from jaxpp_flax.engine.tracing.ir import Constant, Equation, Graph, Value, bodies, from_jaxpr, values
from jaxpp_flax.processes import value_hash

__all__ = ["Initializer"]

# One result of an equation, or all results (None).
_Unit: TypeAlias = tuple[Equation, int | None]

# Eager JAX runs the operations inside these calls one by one.
_TRANSPARENT = {"custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}
# Each element of the result depends on the elements at the same place, and on scalars. So a device can compute its part
# of the result alone, with the same bits.
_ELEMENTWISE = frozenset({
    "abs", "add", "add_any", "and", "bitcast_convert_type", "broadcast_in_dim", "ceil", "clamp", "convert_element_type",
    "copy", "copy_p", "cos", "div", "eq", "erf", "erf_inv", "exp", "exp2", "expm1", "floor", "ge", "gt", "integer_pow",
    "iota", "le", "log", "log1p", "lt", "max", "min", "mul", "ne", "neg", "nextafter", "not", "or", "pow",
    "random_bits", "random_unwrap", "random_wrap", "rem", "round", "rsqrt", "select_n", "shift_left",
    "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sqrt", "square", "stop_gradient", "sub", "tan",
    "tanh", "xor",
})  # fmt: skip
# Operations whose result never shares memory with an operand, so that it can reuse the memory of one.
_FRESH = frozenset({"add", "convert_element_type", "div", "exp", "max", "min", "mul", "neg", "sqrt", "sub"})
# The results of a larger equation with an inner program are made one by one.
_LARGE = 1 << 20


@dataclass(frozen=True, eq=False)
class Initializer:
    """A traced construction of a model: its program, and the tree of the results.

    Example:
      >>> import jax.numpy as jnp
      >>> made = Initializer.trace(lambda: {"w": jax.random.normal(jax.random.key(0), (2,)) * 3.0, "b": jnp.zeros(2)})
      >>> made.shapes["w"].shape
      (2,)
      >>> bool((made.make()["w"] == jax.random.normal(jax.random.key(0), (2,)) * 3.0).all())
      True
    """

    shapes: Any  # a `jax.ShapeDtypeStruct` for each leaf
    graph: Graph
    consts: tuple[Any, ...]

    @classmethod
    def trace(cls, function: Callable[[], Any]) -> Initializer:
        """Trace `function`, which takes nothing and returns a tree; nothing is computed.

        Raises:
          jax.errors.JAXTypeError: if the function reads the value of an array.
        """
        jaxpr, shapes = jax.make_jaxpr(lambda: function(), return_shape=True)()  # a new function: JAX caches traces
        graph, consts = from_jaxpr(jaxpr)
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), shapes)
        return cls(shapes, replace(graph, equations=tuple(_expanded(graph.equations))), tuple(consts))

    def lines(self) -> list[str]:
        """Return the program and its constants as lines, equal in every process that traces the same construction."""
        return [*describe_graph(self.graph), *(f"constant {value_hash(const)}" for const in self.consts)]

    def make(self) -> Any:
        """Return all values, as the eager construction makes them: arrays on the default device."""
        leaves, tree = jax.tree.flatten(self.shapes)
        made = dict(self._leaves(dict.fromkeys(range(len(leaves)))))
        return jax.tree.unflatten(tree, [jax.numpy.array(made[i], copy=True) for i in range(len(leaves))])

    @context_mesh(None)  # with a context mesh, JAX would compare devices with the devices of that mesh
    def make_on_ranks(self, shardings: Any) -> Any:
        """Return a tree of `MpmdArray`s; `shardings` has an `MpmdSharding` for each leaf.

        Only the leaves of this process's ranks are made, one after another, and all else in the program is left out. A
        leaf that its ranks divide is made divided. Another leaf is whole on the default device until it is copied.
        """
        wanted: list[MpmdSharding]
        wanted, tree = jax.tree.flatten(shardings)
        shapes = jax.tree.leaves(self.shapes)
        own = {i: s for i, s in enumerate(wanted) if any(map(s.mpmd_mesh.is_local, s.ranks))}
        workshops: dict[int, NamedSharding | None] = {
            i: _workshop(sharding, shapes[i].shape) for i, sharding in own.items()
        }
        parts: list[dict[int, jax.Array]] = [{} for _ in wanted]
        for i, value in self._leaves(workshops):
            for rank in filter(own[i].mpmd_mesh.is_local, own[i].ranks):
                parts[i][rank] = place(value, own[i].local_sharding(rank), may_alias=False)
            # The next leaf begins when the memory of this one is free.
            jax.block_until_ready(list(parts[i].values()))
        return jax.tree.unflatten(
            tree,
            [
                MpmdArray(part, sharding, shape=shape.shape, dtype=shape.dtype)
                for part, sharding, shape in zip(parts, wanted, shapes, strict=True)
            ],
        )

    def make_some(
        self,
        name: Callable[[Any, Any], Mapping[str, Any]],
        paths: Container[str],
        shardings: Mapping[str, Any] | None,
    ) -> dict[str, Any]:
        """Return some leaves by path, without making the others.

        Args:
          name: returns the leaves of the two trees of the results by path.
          paths: of the wanted leaves.
          shardings: an `MpmdSharding` for each path; None makes the values on the default device.
        """
        leaves, tree = jax.tree.flatten(self.shapes)
        numbers = name(*jax.tree.unflatten(tree, range(len(leaves))))
        wanted = {path: number for path, number in numbers.items() if path in paths}
        # In the order of JAX, which sorts the keys of a dictionary.
        graph = replace(self.graph, outputs=tuple(self.graph.outputs[wanted[path]] for path in sorted(wanted)))
        part = replace(self, shapes={path: leaves[number] for path, number in wanted.items()}, graph=graph)
        return part.make() if shardings is None else part.make_on_ranks({path: shardings[path] for path in wanted})

    def _leaves(self, wanted: dict[int, NamedSharding | None]) -> Iterator[tuple[int, Any]]:
        """Yield the position and the value of each wanted leaf; a value is dropped after its last use."""
        run = _Run(self.graph, self.consts, wanted)
        for i in wanted:
            yield i, run.leaf(i)


def _workshop(sharding: MpmdSharding, shape: tuple[int, ...]) -> NamedSharding | None:
    """Return the sharding in which a leaf is made; None for a whole leaf on the default device.

    All divided leaves are made on the devices of the process's first rank, so that the ranks share compiled programs.
    """
    mesh = sharding.mpmd_mesh
    first = sharding.local_sharding(mesh.local_ranks[0])
    partitionable = jax.config.jax_threefry_partitionable  # pyright: ignore[reportAttributeAccessIssue]
    if not partitionable or not first.is_fully_addressable or first.shard_shape(shape) == shape:
        return None
    return first


def _expanded(equations: Sequence[Equation]) -> Iterator[Equation]:
    """Yield the equations, with those of a transparent call in place of the call."""
    for equation in equations:
        if equation.name not in _TRANSPARENT:
            yield equation
            continue
        inner, consts = from_jaxpr(equation.params[_TRANSPARENT[equation.name]])
        given = [*(Constant(c, v.aval) for c, v in zip(consts, inner.inputs, strict=False)), *equation.inputs]
        known: dict[Any, Any] = dict(zip(inner.inputs, given, strict=True))
        results: dict[Any, Any] = dict(zip(inner.outputs, equation.outputs, strict=True))
        if len(results) < len(equation.outputs) or any(atom in known or isinstance(atom, Constant) for atom in results):
            yield equation  # a result that is an operand, or is returned twice: rare, and right as one program
            continue
        for each in _expanded(inner.equations):
            yield replace(
                each,
                inputs=tuple(known.get(a, results.get(a, a)) for a in each.inputs),
                outputs=tuple(results.get(v, v) for v in each.outputs),  # type: ignore[misc]
            )


@dataclass(frozen=True, eq=False)
class _Task:
    """The evaluation of one unit."""

    equation: Equation
    which: int | None  # the only result to make; None: all
    lies: NamedSharding | None  # the sharding of the result; None: whole, on the default device
    donated: tuple[int, ...]  # the operand whose memory the result reuses

    @property
    def made(self) -> tuple[Value, ...]:
        return self.equation.outputs if self.which is None else (self.equation.outputs[self.which],)


class _Run:
    """Evaluates leaves one by one; holds a value only as long as a later leaf needs it.

    All programs are compiled side by side; while the first leaves are made, later programs may still be compiled.
    """

    def __init__(self, graph: Graph, consts: Sequence[Any], wanted: Mapping[int, NamedSharding | None]) -> None:
        self._graph = graph
        self._consts = dict(zip(graph.inputs, consts, strict=True))
        outputs = [graph.outputs[i] for i in wanted]
        self._maker = self._units(outputs)
        self._uses = Counter(values(outputs))
        for equation, _ in set(self._maker.values()):
            self._uses.update(set(values(equation.inputs)))
        self._tasks = self._plan(wanted)
        self._values: dict[Value, Any] = {}
        self._keys, self._programs = Fingerprinter(), dict[Hashable, Callable[..., Any]]()
        self._program_of: dict[_Task, Callable[..., Any]] = {}
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            for task in itertools.chain.from_iterable(self._tasks.values()):
                self._program_of[task] = self._program(task, pool)

    def leaf(self, position: int) -> Any:
        """Return a leaf as planned; the caller copies it. Leaves are asked for in the order of the plan."""
        for task in self._tasks[position]:
            operands = self._take(task.equation.inputs)
            if task.lies is None:
                operands = [_whole(operand) for operand in operands]
            results = self._program_of[task](*operands)
            self._values.update((v, x) for v, x in zip(task.made, results, strict=True) if v in self._maker)
        return self._take([self._graph.outputs[position]])[0]

    def _units(self, atoms: Sequence[Any]) -> dict[Value, _Unit]:
        """Return the unit that makes each value that the atoms depend on."""
        needed, makers = set(values(atoms)), dict[Value, _Unit]()
        for equation in reversed(self._graph.equations):
            results = [v for v in equation.outputs if v in needed]
            if not results:
                continue
            large = len(results) < len(equation.outputs) or sum(v.nbytes for v in results) > _LARGE
            single = len(equation.outputs) > 1 and large and bool(bodies(equation.params))
            makers.update((v, (equation, equation.outputs.index(v) if single else None)) for v in results)
            needed.update(values(equation.inputs))
        return makers

    def _plan(self, wanted: Mapping[int, NamedSharding | None]) -> dict[int, list[_Task]]:
        """Return the tasks of each leaf, in order: those that no earlier leaf has run."""
        order = {equation: i for i, equation in enumerate(self._graph.equations)}
        uses, layout = self._uses.copy(), dict[Value, NamedSharding | None]()
        plan: dict[int, list[_Task]] = {}
        for position, sharding in wanted.items():
            atom, tasks = self._graph.outputs[position], list[_Task]()
            for equation, which in sorted(self._due(atom, layout), key=lambda unit: (order[unit[0]], unit[1] or 0)):
                result = equation.outputs[which or 0].aval
                divides = sharding is not None and result.shape == atom.aval.shape and _is_elementwise(equation)
                lies = sharding if divides else None
                uses.subtract(set(values(equation.inputs)))
                free = {v for v in values(equation.inputs) if not uses[v] and v not in self._consts}
                fits = {v for v in free if lies is None or layout[v] == lies}
                tasks.append(_Task(equation, which, lies, _reused(equation, fits)))
                layout.update((v, lies) for v in tasks[-1].made)
            uses.subtract(values([atom]))
            plan[position] = tasks
        return plan

    def _due(self, atom: Any, done: Container[Value]) -> set[_Unit]:
        """Return the units to evaluate for a value."""
        stack, found = values([atom]), set[_Unit]()
        while stack:
            value = stack.pop()
            if value in done or value in self._consts or self._maker[value] in found:
                continue
            found.add(self._maker[value])
            stack.extend(values(self._maker[value][0].inputs))
        return found

    def _take(self, atoms: Sequence[Any]) -> list[Any]:
        """Return the values of atoms; forget those that are not used again."""
        found = [
            np.asarray(atom.value, atom.aval.dtype)
            if isinstance(atom, Constant)
            else self._consts[atom]
            if atom in self._consts
            else self._values[atom]
            for atom in atoms
        ]
        for atom in set(values(atoms)):
            self._uses[atom] -= 1
            if not self._uses[atom]:
                self._values.pop(atom, None)
        return found

    def _program(self, task: _Task, pool: ThreadPoolExecutor) -> Callable[..., Any]:
        """Return the compiled equation. Its literals are arguments, as in eager JAX: XLA would compute with them."""
        equation, which = task.equation, task.which
        operands = tuple(Value(atom.aval) for atom in equation.inputs)
        alone = Graph(operands, equation.outputs, (equation.reading(operands),))
        key = (self._keys.graph(alone), which, task.lies, task.donated)
        if key in self._programs:
            return self._programs[key]

        def run(*operands: Any) -> list[Any]:
            results = equation.bind(*operands)
            return list(results) if which is None else [results[which]]

        shardings = None if task.lies is None else [task.lies] * len(task.made)
        jitted = jax.jit(run, donate_argnums=task.donated, out_shardings=shardings)
        if task.lies is not None or not self._consts.keys().isdisjoint(equation.inputs):
            self._programs[key] = jitted  # operands may lie on other devices
        else:
            lowered = jitted.lower(*(jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in operands))
            compiling = pool.submit(lowered.compile)
            self._programs[key] = lambda *operands: compiling.result()(*operands)
        return self._programs[key]


def _reused(equation: Equation, free: Container[Value]) -> tuple[int, ...]:
    """Return the position of an operand whose memory the result can reuse, if there is one."""
    result = equation.outputs[0].aval
    return tuple(
        i
        for i, atom in enumerate(equation.inputs if equation.name in _FRESH and result.size > 1 else ())
        if isinstance(atom, Value)
        and atom in free
        and equation.inputs.count(atom) == 1
        and (atom.aval.shape, atom.aval.dtype) == (result.shape, result.dtype)
    )[:1]


def _is_elementwise(equation: Equation) -> bool:
    """Return True if the equation, with all equations inside, works element by element."""
    if len(equation.outputs) > 1:
        return False
    inner = bodies(equation.params)
    if not inner:  # a key may be of any generator
        return equation.name in _ELEMENTWISE and equation.name != "random_bits"
    return all(_all_elementwise(body) for body in inner)


def _all_elementwise(jaxpr: Any) -> bool:
    for eqn in jaxpr.eqns:
        name, inner = eqn.primitive.name, bodies(eqn.params)
        if not all(map(_all_elementwise, inner)) or not (inner or name in _ELEMENTWISE):
            return False
        # The bits of other generators than Threefry depend on the division.
        if name == "random_bits" and str(eqn.invars[0].aval.dtype) != "key<fry>":
            return False
    return True


def _whole(operand: Any) -> Any:
    """Return an operand of an equation that needs all of it: on the default device."""
    if isinstance(operand, jax.Array) and len(operand.sharding.device_set) > 1:
        return jax.device_put(np.asarray(operand))
    return operand
