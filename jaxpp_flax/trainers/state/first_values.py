"""A traced function as one program for each leaf of its result: a model's construction, an optimizer's `init`.

Small values that depend on no argument (keys of random numbers, counters) are computed once, operation by operation.
What else a leaf needs is a program of its own, in which these values and all constants are arguments: equal leaves
share it. First values are made whole on one device, and then put where they live. So a leaf has the same bits for every
number of stages, processes and devices. One program for a whole model would not: XLA multiplies constants of
neighbouring operations. It would compile for longer, too: 112 s for 320 kernels that eager JAX makes in 2 s.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp_flax.checkpoint.format.paths import flatten
from jaxpp_flax.engine.arrays.ambient_mesh import context_mesh
from jaxpp_flax.engine.arrays.device_memory import shortage
from jaxpp_flax.engine.arrays.mesh import MpmdSharding, named_memory
from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray
from jaxpp_flax.engine.arrays.placing import place_on_ranks
from jaxpp_flax.engine.program.description import describe_graph
from jaxpp_flax.engine.tracing.graph_text import Fingerprinter
from jaxpp_flax.engine.tracing.inline import inline
from jaxpp_flax.engine.tracing.ir import Atom, Constant, Equation, Graph, Value, from_jaxpr, values
from jaxpp_flax.processes import value_hash, value_text

__all__ = ["LeafPrograms"]

# The most elements of a value that is computed once, for all leaves.
_SMALL = 1 << 8
# What a device holds at one time of a random leaf that it makes: random bits, and values before and after an operation.
_TIMES = 3


@dataclass(frozen=True, eq=False)
class LeafPrograms:
    """The programs of a traced function, and the tree of its results. Leaves are named by their logical paths.

    Example:
      >>> made = LeafPrograms.trace(lambda: {"w": jax.random.normal(jax.random.key(0), (2,)) * 3.0, "b": jnp.zeros(2)})
      >>> made.shapes["w"].shape
      (2,)
      >>> bool(jnp.allclose(made.compute((), {"w": None})["w"], jax.random.normal(jax.random.key(0), (2,)) * 3.0))
      True
    """

    shapes: Any  # a `jax.ShapeDtypeStruct` for each leaf
    graph: Graph  # its inputs: the constants, and the leaves of the arguments
    consts: tuple[Any, ...]

    @classmethod
    def trace(cls, function: Callable[..., Any], *arguments: Any) -> LeafPrograms:
        """Trace a function of arrays, or of their shapes; nothing is computed.

        Raises:
          jax.errors.JAXTypeError: if the function reads the value of an array.
        """
        # A new function: JAX caches traces.
        jaxpr, shapes = jax.make_jaxpr(lambda *of: function(*of), return_shape=True)(*arguments)
        graph, consts = from_jaxpr(jaxpr)
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), shapes)
        return cls(shapes, inline(graph, flatten=True), tuple(consts))

    def hash(self) -> str | None:
        """Return a hash of the program and its constants, equal in every process that traces the same function."""
        lines = [*describe_graph(self.graph), *(f"constant {value_hash(const)}" for const in self.consts)]
        return value_hash(np.frombuffer("\n".join(lines).encode(), np.uint8))

    @context_mesh(None)  # with a context mesh, JAX would compare devices with the devices of that mesh
    def compute(self, argument: Any, places: Mapping[str, Any], *, whole: bool = False) -> dict[str, Any]:
        """Return the leaves at these paths, each at its place.

        Args:
          argument: the function's argument, a tree of arrays; `MpmdArray`s if the places are of ranks. What a rank
            needs is copied to it. `()` for a function without arguments.
          places: an `MpmdSharding` for each path, a sharding of JAX, or None for a new array on the default device. A
            leaf that no rank of this process holds is not computed here.
          whole: makes each leaf whole on one device, and then puts it to its place: XLA rounds random values otherwise
            in a program for parts. A leaf that one device cannot hold is made in parts all the same, if its rank
            belongs to this process alone.
        """
        inputs = dict(zip(self._arguments, jax.tree.leaves(argument), strict=True))
        shapes, found = flatten(self.shapes)[0], dict[str, Any]()
        for path, to in places.items():
            if isinstance(to, MpmdSharding) and not any(map(to.mpmd_mesh.is_local, to.ranks)):
                found[path] = MpmdArray({}, to, shape=shapes[path].shape, dtype=shapes[path].dtype)
        for path, program in self._programs([path for path in places if path not in found]):
            to = places[path]
            if not isinstance(to, MpmdSharding):
                parts = [program(inputs, to)]
                (found[path],) = parts
            else:
                found[path] = (
                    _whole(program, to) if whole and _fits_whole(program, to) else _on_ranks(program, inputs, to)
                )
                parts = [*_parts(found[path]).values()]
            # The next leaf begins when the memory of this one is free, and when it left devices that pass it on.
            if (whole and to is not None) or named_memory(to) is not None:
                jax.block_until_ready(parts)
        return {path: found[path] for path in places}

    def single_numbers(self) -> dict[str, str | None]:
        """Return the single numbers among the leaves that depend on no argument (hyperparameters), as text.

        Example:
          >>> import optax
          >>> init = optax.inject_hyperparams(optax.sgd)(learning_rate=0.25).init
          >>> LeafPrograms.trace(init, {"w": jnp.zeros(2)}).single_numbers()["hyperparams/learning_rate"]
          '0.25'
        """
        keys = jax.dtypes.prng_key
        shapes = flatten(self.shapes)[0].items()
        single = [path for path, of in shapes if of.size == 1 and not jnp.issubdtype(of.dtype, keys)]
        with context_mesh(None):
            programs = [(path, program) for path, program in self._programs(single) if not program.arguments]
            return {path: value_text(program({}, None)) for path, program in programs}

    def reads(self) -> dict[str, set[int]]:
        """Return the numbers of the argument's leaves that each leaf depends on.

        Example:
          >>> init = lambda params: {"z": params, "size": abs(params["w"]).sum(), "mu": 0 * jnp.ones(2)}
          >>> LeafPrograms.trace(init, {"w": jnp.ones(2)}).reads()
          {'mu': set(), 'size': {0}, 'z/w': {0}}
        """
        numbers, found = {value: i for i, value in enumerate(self._arguments)}, dict[str, set[int]]()
        for path, atom in zip(flatten(self.shapes)[0], self.graph.outputs, strict=True):
            read = {of for maker in self._makers([atom], self.graph.inputs) for of in maker.inputs}
            found[path] = {numbers[of] for of in (atom, *read) if of in numbers}
        return found

    @property
    def _arguments(self) -> tuple[Value, ...]:
        return self.graph.inputs[len(self.consts) :]

    def _programs(self, paths: Iterable[str]) -> Iterator[tuple[str, _Program]]:
        """Yield the program of each leaf; what is small and depends on no argument is computed now."""
        graph, known = self.graph, dict[Value, Any](zip(self.graph.inputs, self.consts, strict=False))
        outputs = dict(zip(flatten(self.shapes)[0], graph.outputs, strict=True))
        wanted = {path: outputs[path] for path in paths}
        for equation in self._makers(wanted.values(), graph.inputs):
            is_small = all(value.aval.size <= _SMALL for value in equation.outputs)
            if is_small and all(value in known for value in values(equation.inputs)):
                known.update(zip(equation.outputs, equation.bind(*_read(equation.inputs, known)), strict=True))
        given = {*known, *graph.inputs}
        for path, atom in wanted.items():
            alone, read = _with_arguments(self._makers([atom], given), atom)
            yield path, _Program(alone, read, known, self._keys.graph(alone), self._jitted)

    def _makers(self, atoms: Iterable[Atom], known: Container[Value]) -> list[Equation]:
        """Return the equations that make the atoms out of known values, in order."""
        stack, found, producer = values(atoms), set[Equation](), self.graph.producer
        while stack:
            value = stack.pop()
            if value not in known and (maker := producer[value]) not in found:
                found.add(maker)
                stack.extend(values(maker.inputs))
        return sorted(found, key=self._order.__getitem__)

    @cached_property
    def _order(self) -> dict[Equation, int]:
        return {equation: i for i, equation in enumerate(self.graph.equations)}

    @cached_property
    def _keys(self) -> Fingerprinter:
        return Fingerprinter()

    @cached_property
    def _jitted(self) -> dict[Any, Callable[..., jax.Array]]:
        return {}  # by the key of the program, and the sharding of its result


@dataclass(frozen=True)
class _Program:
    """The program of a leaf, and the atoms that are its operands; programs with one key share what is compiled."""

    graph: Graph
    read: Sequence[Atom]
    known: Mapping[Value, Any]
    key: Hashable
    jitted: dict[Any, Callable[..., jax.Array]]

    @property
    def arguments(self) -> list[Value]:
        """The arguments of the traced function that the leaf depends on."""
        return [atom for atom in values(self.read) if atom not in self.known]

    def __call__(self, inputs: Mapping[Value, Any], sharding: Any) -> jax.Array:
        """Return the leaf as a new array; None: on the default device."""
        operands = _read(self.read, self.known, inputs)
        if not self.graph.equations and sharding is None:
            return jnp.array(operands[0], copy=True)
        key = self.key, sharding
        if key not in self.jitted:
            graph = self.graph  # alone: what is compiled is kept, and `known` with it otherwise
            self.jitted[key] = jax.jit(lambda *of: graph.run(*of)[0], out_shardings=sharding)
        return self.jitted[key](*operands)


def _with_arguments(equations: Sequence[Equation], result: Atom) -> tuple[Graph, list[Atom]]:
    """Return the equations as a function of all that they read, constants too; and these atoms.

    As in eager JAX, XLA does not compute with constants beforehand, and equal layers differ in no constant.
    """
    made = {value for equation in equations for value in equation.outputs}
    outside = [atom for equation in equations for atom in equation.inputs if atom not in made]
    argument: dict[Atom, Value] = {
        atom: Value(atom.aval) for atom in dict.fromkeys([*outside, result]) if atom not in made
    }
    changed = [each.reading(tuple(argument.get(atom, atom) for atom in each.inputs)) for each in equations]
    return Graph(tuple(argument.values()), (argument.get(result, result),), tuple(changed)), [*argument]


def _read(atoms: Iterable[Atom], known: Mapping[Value, Any], inputs: Mapping[Value, Any] | None = None) -> list[Any]:
    """Return the values of known atoms, and of arguments."""

    def one(atom: Atom) -> Any:
        if isinstance(atom, Constant):
            return atom.value if isinstance(atom.value, jax.Array) else np.asarray(atom.value, atom.aval.dtype)
        return known[atom] if atom in known else (inputs or {})[atom]

    return [one(atom) for atom in atoms]


def _fits_whole(program: _Program, to: MpmdSharding) -> bool:
    """True if one device can make the leaf whole. Ranks of several processes cannot find out by themselves."""
    aval = program.graph.outputs[0].aval
    needed = _TIMES * aval.size * int(getattr(aval.dtype, "itemsize", 0))
    is_own = all(to.local_sharding(rank).is_fully_addressable for rank in to.ranks if to.mpmd_mesh.is_local(rank))
    return not is_own or shortage({jax.local_devices()[0]: needed}) is None


def _whole(program: _Program, to: MpmdSharding) -> MpmdArray:
    return place_on_ranks(program({}, None), to)


def _on_ranks(program: _Program, inputs: Mapping[Value, Any], to: MpmdSharding) -> MpmdArray:
    """Return a leaf that each rank computes from its own copies of the arguments."""
    ranks = [rank for rank in to.ranks if to.mpmd_mesh.is_local(rank)]
    reads = {rank: {v: _on_rank(inputs[v], rank) for v in program.arguments} for rank in ranks}
    parts = {rank: program(reads[rank], to.local_sharding(rank)) for rank in ranks}
    aval = program.graph.outputs[0].aval
    return MpmdArray(parts, to, shape=aval.shape, dtype=aval.dtype)


def _parts(leaf: MpmdArray) -> Mapping[int, jax.Array]:
    return leaf._partially_addressable_arrays  # pyright: ignore[reportPrivateUsage]


def _on_rank(leaf: MpmdArray, rank: int) -> jax.Array:
    part = _parts(leaf).get(rank)
    return part if part is not None else jax.device_put(leaf._value, leaf.sharding.local_sharding(rank))
