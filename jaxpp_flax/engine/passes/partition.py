"""Cut a labelled loop body into tasks, one for each stage and kind, and its reductions into accumulators.

Every task is a `Graph` of its own over shared `Value`s: a value that one task defines and another reads is an edge
between them. Reductions belong to the loop: each task updates the accumulators of the results it makes, and a sum over
several stages stays one partial accumulator for each of them, added up once after the loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxpp_flax.engine.passes.label import Labels
from jaxpp_flax.engine.tracing.ir import (
    Atom,
    Constant,
    Equation,
    Graph,
    Value,
    VerificationError,
    from_jaxpr,
    struct_of,
)
from jaxpp_flax.engine.tracing.markers import marker_p
from jaxpp_flax.engine.tracing.treduce import AddOp, Concat, MaxOp, Op
from jaxpp_flax.schedules.task import TaskKind

__all__ = ["Accumulator", "Carry", "CarryError", "LoopTask", "Partial", "Partition", "partition"]


class CarryError(ValueError):
    """A leaf of the carry flows against the pipeline."""


@dataclass(frozen=True, eq=False)
class LoopTask:
    """The work of one stage and kind for one microbatch.

    `fused` marks a last stage whose forward and backward run as one task (its kind is FORWARD).
    """

    stage: int
    kind: TaskKind
    graph: Graph
    fused: bool = False

    @property
    def name(self) -> str:
        """As in schedules: `fwd_2`, `bwd_2`, ..."""
        prefix = {
            TaskKind.FORWARD: "fwd",
            TaskKind.BACKWARD: "bwd",
            TaskKind.BACKWARD_INPUT: "bwd_i",
            TaskKind.BACKWARD_WEIGHT: "bwd_w",
        }[self.kind]
        return f"{'fwd_bwd' if self.fused else prefix}_{self.stage}"


@dataclass(frozen=True, eq=False)
class Accumulator:
    """One reduced result, or one stage's partial sum of it: `task` reads `state` and defines `result`.

    `ordered` tells that the microbatches must come in order, as a reduction of the user's own may need it.
    """

    task: int
    state: Value
    result: Value
    init: Graph
    ordered: bool = False


@dataclass(frozen=True, eq=False)
class Carry:
    """One copy of a carry leaf, kept by the stage of `task`, which reads `state` and defines `result`."""

    leaf: int
    task: int
    state: Value
    result: Value


@dataclass(frozen=True)
class Partial:
    """A sum of two results of the loop, taken after it: leaves are indices of accumulators."""

    left: Partial | int
    right: Partial | int


@dataclass(frozen=True)
class Partition:
    """A loop cut into tasks; `results` names, for each output of the loop after the carry, where it comes from."""

    num_stages: int
    operands: tuple[Value, ...]
    index: Value
    tasks: tuple[LoopTask, ...]
    accumulators: tuple[Accumulator, ...]
    carries: tuple[Carry, ...]
    results: tuple[Partial | int, ...]

    def verify(self) -> None:
        """Check each task, and that each edge is defined by one task, earlier in the order of phases."""
        known = {*self.operands, self.index}
        known.update(a.state for a in self.accumulators)
        known.update(c.state for c in self.carries)
        made: set[Value] = set()
        for task in self.tasks:
            task.graph.verify()
            for value in task.graph.inputs:
                if value not in known and value not in made:
                    raise VerificationError(f"task {task.name} reads a value that no earlier task makes")
            for atom in task.graph.outputs:
                if not isinstance(atom, Value):
                    raise VerificationError(f"task {task.name} returns a constant")
                made.add(atom)

    def as_text(self) -> str:
        """The listing of every task."""
        return "\n".join(f"task {t.name} (stage {t.stage})\n{t.graph.as_text()}" for t in self.tasks)


def _split_sums(labels: Labels, users: dict[Value, int], value: Value, producer: dict[Value, Equation]) -> Any:
    """Take apart a sum over several stages: a nested pair of addends, or the value itself."""
    equation = producer.get(value)
    if equation is None or equation.name not in ("add_any", "add") or equation not in labels.phase:
        return value
    operands = [labels.resolve(a) for a in equation.inputs]
    if users.get(value, 0) > 1 or not all(isinstance(a, Value) and a.aval.shape == value.aval.shape for a in operands):
        return value
    phases = [_phase_of(labels, producer, a) for a in operands]
    if None in phases or phases[0] == phases[1]:
        return value
    return tuple(_split_sums(labels, users, a, producer) for a in operands if isinstance(a, Value))


def _phase_of(labels: Labels, producer: dict[Value, Equation], atom: Atom) -> int | None:
    equation = producer.get(atom) if isinstance(atom, Value) else None
    return labels.phase.get(equation) if equation is not None else None


def partition(
    labels: Labels,
    num_consts: int,
    num_carry: int,
    operations: Sequence[Op],
    length: int,
    *,
    fuse_last: bool,
    split_backward: bool,
    carry_names: Sequence[str] = (),
) -> Partition:
    """Build the tasks of a labelled body.

    Args:
      labels: from `label`.
      num_consts: number of constants among the body's inputs.
      num_carry: number of carry leaves.
      operations: one for each result after the carry.
      length: number of microbatches.
      fuse_last: run the last stage's forward and backward as one task.
      split_backward: split each backward task but the first stage's into input and weight gradients.
      carry_names: the path of each carry leaf, for messages.

    Raises:
      CarryError: if a leaf of the carry is written by a later phase than one that reads it.
    """
    builder = _Builder(labels, num_consts, num_carry, operations, length, fuse_last, split_backward)
    builder.carry_names = tuple(carry_names) or tuple(f"[leaf {j}]" for j in range(num_carry))
    return builder.build()


class _Builder:
    def __init__(
        self,
        labels: Labels,
        num_consts: int,
        num_carry: int,
        operations: Sequence[Op],
        length: int,
        fuse_last: bool,
        split_backward: bool,
    ) -> None:
        self.labels, self.body, self.stages = labels, labels.body, labels.num_stages
        self.num_carry, self.operations, self.length = num_carry, operations, length
        self.carry_names: tuple[str, ...] = ()
        self.operands = self.body.inputs[:num_consts]
        self.index = self.body.inputs[num_consts]
        self.carry_in = self.body.inputs[num_consts + 1 :]
        self.producer = {v: e for e in self.body.equations if e.primitive is not marker_p for v in e.outputs}
        self.order = {e: i for i, e in enumerate(self.body.equations)}
        self.key = {e: self._key(phase, fuse_last) for e, phase in labels.phase.items()}
        self.barrier: set[tuple[int, int]] = {(self.stages - 1, 0)} if fuse_last else set()
        if split_backward:
            self._split()
        self.equations: dict[tuple[int, int], list[Equation]] = {}
        for equation in self.body.equations:
            if equation in self.key:
                self.equations.setdefault(self.key[equation], []).append(equation)
        # What each task computes or returns beside its labelled equations.
        self.extra: dict[tuple[int, int], list[Equation]] = {}
        self.returns: dict[tuple[int, int], list[Value]] = {}
        self.wanted: dict[tuple[int, int], list[Value]] = {}
        self.states: list[Value] = []
        self.ordered: list[bool] = []

    def _key(self, phase: int, fuse_last: bool) -> tuple[int, int]:
        return (self.stages - 1, 0) if fuse_last and phase == self.stages else (phase, 0)

    def _split(self) -> None:
        """Zero-bubble: what the cotangents that leave the stage do not need moves into a task of its own."""
        leaving: set[Value] = set()
        for equation in self.body.equations:
            for atom in map(self.labels.resolve, equation.inputs):
                made = self.producer.get(atom) if isinstance(atom, Value) else None
                if made in self.key and equation in self.key and self.key[made][0] != self.key[equation][0]:
                    leaving.add(atom)  # type: ignore[arg-type]
        needed = set(leaving)
        for equation in reversed(self.body.equations):
            key = self.key.get(equation)
            if key is None or not self.stages <= key[0] < 2 * self.stages - 1:
                continue
            if not needed.isdisjoint(equation.outputs):
                needed.update(a for a in map(self.labels.resolve, equation.inputs) if isinstance(a, Value))
            else:
                self.key[equation] = (key[0], 1)

    def _home(self, atom: Atom) -> tuple[int, int]:
        """The task that holds a result: its maker, or the last stage's forward for what anyone can compute."""
        equation = self.producer.get(atom) if isinstance(atom, Value) else None
        return self.key.get(equation, (self.stages - 1, 0)) if equation is not None else (self.stages - 1, 0)

    def build(self) -> Partition:
        accumulators: list[tuple[tuple[int, int], Value, Value, Graph]] = []
        results: list[Partial | int] = []
        roots: list[Atom] = [self.labels.resolve(a) for a in self.body.outputs[: self.num_carry]]
        users: dict[Value, int] = {}
        for equation in self.body.equations:
            for atom in map(self.labels.resolve, equation.inputs):
                if isinstance(atom, Value) and equation.primitive is not marker_p:
                    users[atom] = users.get(atom, 0) + 1
        for atom in map(self.labels.resolve, self.body.outputs):
            if isinstance(atom, Value):
                users[atom] = users.get(atom, 0) + 1

        def place(tree: Any, op: Op) -> Partial | int:
            if isinstance(tree, tuple):
                return Partial(place(tree[0], op), place(tree[1], op))
            accumulators.append(self._accumulate(tree, op))
            # A subclass may mean something else: it is an operation of the user's own.
            self.ordered.append(type(op) not in (AddOp, MaxOp, Concat))
            roots.append(tree)
            return len(accumulators) - 1

        for atom, op in zip(self.body.outputs[self.num_carry :], self.operations, strict=True):
            atom = self.labels.resolve(atom)
            tree = atom
            if type(op) is AddOp and isinstance(atom, Value):
                tree = _split_sums(self.labels, users, atom, self.producer)
            results.append(place(tree, op))

        self._drop_unneeded(roots)
        for key, equations in self.equations.items():
            wanted = self.wanted.setdefault(key, [])
            for equation in equations:
                wanted.extend(a for a in map(self.labels.resolve, equation.inputs) if isinstance(a, Value))
        carries = self._carries()
        keys = sorted({*self.equations, *self.extra, *self.returns})
        position = {key: i for i, key in enumerate(keys)}
        graphs = self._graphs(keys)
        tasks = tuple(self._task(key, graph) for key, graph in zip(keys, graphs, strict=True))
        return Partition(
            self.stages,
            self.operands,
            self.index,
            tasks,
            tuple(
                Accumulator(position[key], state, result, init, ordered)
                for (key, state, result, init), ordered in zip(accumulators, self.ordered, strict=True)
            ),
            tuple(Carry(leaf, position[key], state, result) for leaf, key, state, result in carries),
            tuple(results),
        )

    def _drop_unneeded(self, roots: Sequence[Atom]) -> None:
        """Forget what nothing needs any more: sums over several stages that were taken apart."""
        needed = {a for a in roots if isinstance(a, Value)}
        for equation in reversed(self.body.equations):
            if equation.primitive is marker_p:
                continue
            if equation.effects or not needed.isdisjoint(equation.outputs):
                needed.update(a for a in map(self.labels.resolve, equation.inputs) if isinstance(a, Value))
            else:
                self.key.pop(equation, None)
        for key, equations in list(self.equations.items()):
            self.equations[key] = [e for e in equations if e in self.key]
            if not self.equations[key]:
                del self.equations[key]

    def _accumulate(self, atom: Atom, op: Op) -> tuple[tuple[int, int], Value, Value, Graph]:
        """Append `op`'s update of an accumulator to the task that makes `atom`."""
        key = self._home(atom)
        aval = struct_of(atom.aval)
        initial = jax.make_jaxpr(lambda: op.state(self.length, aval))()
        init, consts = from_jaxpr(initial)
        if consts:  # arrays captured by a user's operation become part of the program
            init, _ = from_jaxpr(initial, [Constant(c, jax.typeof(c)) for c in consts])
        state = Value(init.outputs[0].aval)
        self.states.append(state)
        update = jax.make_jaxpr(op.update)(struct_of(state.aval), aval, jax.ShapeDtypeStruct((), jnp.int32))
        captured = [Constant(c, jax.typeof(c)) for c in getattr(update, "consts", ())]
        graph, _ = from_jaxpr(update, [*captured, state, atom, self.index])
        result = graph.outputs[0]
        extra = self.extra.setdefault(key, [])
        extra.extend(graph.equations)
        if not isinstance(result, Value) or result not in {v for e in graph.equations for v in e.outputs}:
            result = self._copy(key, result)  # the operation returns its operand as it is: give it a name of its own
        self.returns.setdefault(key, []).append(result)
        wanted = self.wanted.setdefault(key, [])
        wanted.extend(a for e in graph.equations for a in e.inputs if isinstance(a, Value))
        return key, state, result, init

    def _copy(self, key: tuple[int, int], atom: Atom) -> Value:
        jaxpr = jax.make_jaxpr(lambda x: jax.lax.copy_p.bind(x))(struct_of(atom.aval))
        graph, _ = from_jaxpr(jaxpr, [atom])
        self.extra.setdefault(key, []).extend(graph.equations)
        if isinstance(atom, Value):
            self.wanted.setdefault(key, []).append(atom)
        return graph.outputs[0]  # type: ignore[return-value]

    def _free_closure(self, values: Sequence[Value]) -> tuple[set[Equation], set[Value]]:
        """The free equations that compute `values`, and everything that they and the task read beside."""
        equations: set[Equation] = set()
        read: set[Value] = set()
        stack = list(values)
        while stack:
            value = stack.pop()
            resolved = self.labels.resolve(value)
            if not isinstance(resolved, Value):
                continue
            made = self.producer.get(resolved)
            if made is not None and made in self.labels.free:
                if made not in equations:
                    equations.add(made)
                    stack.extend(a for a in made.inputs if isinstance(a, Value))
            else:
                read.add(resolved)
        return equations, read

    def _carries(self) -> list[tuple[int, tuple[int, int], Value, Value]]:
        """Decide which task writes each leaf of the carry; counters are kept once by every stage that reads them."""
        found: list[tuple[int, tuple[int, int], Value, Value]] = []
        pending = set(range(self.num_carry))
        readers: dict[int, set[tuple[int, int]]] = {j: set() for j in pending}

        def note(key: tuple[int, int], values: Sequence[Value]) -> None:
            read = self._free_closure(values)[1]
            for j in range(self.num_carry):
                if self.carry_in[j] in read:
                    readers[j].add(key)

        for key, wanted in list(self.wanted.items()):
            note(key, wanted)
        for j in sorted(pending):
            if j not in self.labels.counters:
                atom = self.labels.resolve(self.body.outputs[j])
                key = self._home(atom)
                self._check_carry(j, key, readers[j])
                result = self._copy(key, atom)
                self.returns.setdefault(key, []).append(result)
                note(key, [atom] if isinstance(atom, Value) else [])
                found.append((j, key, self.carry_in[j], result))
        # A counter may feed another one: go on until no stage needs a further copy.
        owners: dict[int, dict[int, tuple[int, int]]] = {j: {} for j in self.labels.counters}
        changed = True
        while changed:
            changed = False
            for j in sorted(self.labels.counters):
                wanted_by = sorted(readers[j]) or ([(0, 0)] if not owners[j] else [])
                for key in wanted_by:
                    stage = self._stage(key)
                    if stage not in owners[j]:
                        owners[j][stage] = key
                        out = self.labels.resolve(self.body.outputs[j])
                        note(key, [out] if isinstance(out, Value) else [])
                        changed = True
        for j, stages in owners.items():
            for key in stages.values():
                atom = self.labels.resolve(self.body.outputs[j])
                result = self._copy(key, atom)
                self.returns.setdefault(key, []).append(result)
                found.append((j, key, self.carry_in[j], result))
        return found

    def _check_carry(self, leaf: int, writer: tuple[int, int], readers: set[tuple[int, int]]) -> None:
        early = sorted(key for key in readers if key < writer)
        if not early:
            return
        where = next((e.where for e in self.body.equations if self.carry_in[leaf] in e.inputs), "an unknown line")
        aval = self.carry_in[leaf].aval
        remedy = "Read and write a mutable variable in one stage and one direction."
        if writer[0] < self.stages:
            remedy += " Modules that several stages share (a BatchNorm, say) need variables of their own in each."
        raise CarryError(
            f"the loop's carry{self.carry_names[leaf]} ({aval.str_short()}, first read at {where}) is read in "
            f"{self._describe(early[0])} and written later, in {self._describe(writer)}: the next microbatch would "
            f"have to wait for the whole pipeline. {remedy}"
        )

    def _describe(self, key: tuple[int, int]) -> str:
        return f"the {'forward' if key[0] < self.stages else 'backward'} of stage {self._stage(key)}"

    def _stage(self, key: tuple[int, int]) -> int:
        return key[0] if key[0] < self.stages else 2 * self.stages - 1 - key[0]

    def _graphs(self, keys: Sequence[tuple[int, int]]) -> list[Graph]:
        self.position = {v: i for i, v in enumerate((*self.body.inputs, *self.states))}
        inside: list[tuple[list[Equation], list[Value]]] = []
        outside: set[Value] = set()
        for key in keys:
            own = self.equations.get(key, [])
            extra = self.extra.get(key, [])
            defined = {v for e in (*own, *extra) for v in e.outputs}
            wanted = [a for e in (*own, *extra) for a in map(self.labels.resolve, e.inputs) if isinstance(a, Value)]
            free, read = self._free_closure(wanted)
            ordered = [*sorted((*own, *free), key=self.order.__getitem__), *extra]
            inputs = sorted(read - defined, key=self._input_order)
            inside.append((ordered, inputs))
            outside.update(inputs)
        graphs: list[Graph] = []
        for key, (equations, inputs) in zip(keys, inside, strict=True):
            own = [v for e in self.equations.get(key, []) for v in e.outputs if v in outside]
            outputs = [*dict.fromkeys((*own, *self.returns.get(key, [])))]
            resolved = [replace(e, inputs=tuple(map(self.labels.resolve, e.inputs))) for e in equations]
            if key in self.barrier:
                resolved = _shield_recomputation(resolved)
            graphs.append(Graph(tuple(inputs), tuple(outputs), tuple(resolved)))
        return graphs

    def _input_order(self, value: Value) -> tuple[int, int]:
        """A stable order of a task's inputs: the loop's own, the accumulators, then edges by definition."""
        made = self.producer.get(value)
        if made is not None:
            return (1, self.order[made] * 1000 + made.outputs.index(value))
        return (0, self.position[value])

    def _task(self, key: tuple[int, int], graph: Graph) -> LoopTask:
        stage = self._stage(key)
        if key[0] < self.stages:
            return LoopTask(stage, TaskKind.FORWARD, graph, fused=key in self.barrier)
        if key[1] == 1:
            return LoopTask(stage, TaskKind.BACKWARD_WEIGHT, graph)
        whole = (key[0], 1) not in self.equations
        return LoopTask(stage, TaskKind.BACKWARD if whole else TaskKind.BACKWARD_INPUT, graph)


def _shield_recomputation(equations: Sequence[Equation]) -> list[Equation]:
    """Keep XLA from merging recomputed work with the original inside one fused task: that would undo remat."""
    if not any(e.late for e in equations):
        return list(equations)
    first = next(i for i, e in enumerate(equations) if e.late)
    after = {v for e in equations[first:] for v in e.outputs}
    entering = [
        *dict.fromkeys(a for e in equations if e.late for a in e.inputs if isinstance(a, Value) and a not in after)
    ]
    if not entering:
        return list(equations)
    jaxpr = jax.make_jaxpr(lambda *xs: jax.lax.optimization_barrier(xs))(*(struct_of(v.aval) for v in entering))
    (barrier,) = from_jaxpr(jaxpr, entering)[0].equations
    shielded: dict[Atom, Value] = dict(zip(entering, barrier.outputs, strict=True))
    recomputed = [
        replace(e, inputs=tuple(shielded.get(a, a) for a in e.inputs)) if e.late else e for e in equations[first:]
    ]
    return [*equations[:first], barrier, *recomputed]


def verify_effects(body: Graph, partitioned: Partition, labels: Labels) -> None:
    """Check that no labelled equation stands in two tasks (`Partition.verify` finds those that stand in none)."""
    count: dict[Value, int] = {}
    for task in partitioned.tasks:
        for equation in task.graph.equations:
            for value in equation.outputs:
                count[value] = count.get(value, 0) + 1
    for equation in body.equations:
        if equation in labels.phase and any(count.get(v, 0) > 1 for v in equation.outputs):
            raise VerificationError(f"{equation.name} at {equation.where} stands in several tasks")
