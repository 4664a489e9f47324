"""Turn a traced mpmd function into a program: its tasks and transfers in the order in which the function calls them.

That one order holds on every rank, so a program cannot deadlock: a rank sends a value when the function reaches the
transfer, and no rank waits for a value that is made later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.engine.passes.liveness import donate_and_free
from jaxpp_flax.engine.passes.loop.open_loops import refuse_ordered_effects
from jaxpp_flax.engine.passes.runner import wants_verification
from jaxpp_flax.engine.passes.submesh_constraints import onto_mesh
from jaxpp_flax.engine.program.numbering import TaskStep, TransferStep, numbered
from jaxpp_flax.engine.program.program import Program, ProgramTask
from jaxpp_flax.engine.tracing.ir import Atom, Constant, Equation, Graph, Value, values
from jaxpp_flax.tasks.operations import task_p, transfer_p

__all__ = ["program_of"]


def program_of(
    graph: Graph,
    mesh: MpmdMesh,
    ranks: Sequence[int | None],
    donated: Sequence[bool],
    *,
    infer_donation: bool,
    keep_received: bool,
) -> Program:
    """Make the program of a traced function.

    Args:
      graph: the function; its equations are tasks and transfers.
      mesh: the ranks.
      ranks: for each input, its rank; None for a captured array, which goes to the ranks that read it.
      donated: for each input, whether its memory may be reused.
      infer_donation: donate each value at its last use; otherwise only what tasks donate.
      keep_received: see `donate_and_free`.

    Raises:
      ValueError: if an operation stands outside of the tasks, a donated value is read again or was sent, or a side
        effect is ordered.
    """
    emitter = _Emitter(mesh, dict(zip(graph.inputs, ranks, strict=True)))
    donations = _Donations(dict(zip(graph.inputs, donated, strict=True)))
    for equation in graph.equations:
        if equation.primitive is task_p:
            donations.check_task(equation)
            emitter.task(equation)
        elif equation.primitive is transfer_p:
            donations.check_transfer(equation)
            emitter.transfer(equation)
        else:
            raise _outside_of_tasks(equation)
    donations.check_results(graph.outputs)
    # A returned captured array lies on rank 0.
    results = [(atom, [emitter.rank[atom] or 0] if isinstance(atom, Value) else ()) for atom in graph.outputs]
    arguments = dict.fromkeys(graph.inputs)
    unrolled = numbered(mesh.mpmd_dim, emitter.tasks, emitter.steps, arguments, results)
    donatable = None if infer_donation else [frozenset(task.donate) for task in unrolled.tasks]
    program = donate_and_free(unrolled, donated, keep_received=keep_received, donatable=donatable)
    if wants_verification():
        program.verify()
    return program


def _outside_of_tasks(equation: Equation) -> ValueError:
    label = equation.params.get("name")
    what = f"`{label}`" if isinstance(label, str) else f"`{equation.name}`"
    types = ", ".join(v.aval.str_short(short_dtypes=True) for v in equation.outputs)
    return ValueError(
        f"{what} at {equation.where}, which gives {types}, stands outside of the tasks of an mpmd function, so no rank "
        "would run it. Move it into a task; the function itself may only call tasks, send values, and rearrange "
        "containers."
    )


@dataclass
class _Emitter:
    """The tasks and steps of a function; `rank` holds the rank of each value, None for a captured array."""

    mesh: MpmdMesh
    rank: dict[Value, int | None]
    numbers: dict[tuple[str, int], int] = field(default_factory=dict)
    graphs: dict[int, Graph] = field(default_factory=dict)
    tasks: list[ProgramTask] = field(default_factory=list[ProgramTask])
    steps: list[TaskStep | TransferStep] = field(default_factory=list[TaskStep | TransferStep])

    def __post_init__(self) -> None:
        # A task may name the submesh of any rank.
        self.onto_submesh = onto_mesh(self.mesh.unstack, self.mesh.abstract_submesh)

    def task(self, equation: Equation) -> None:
        called: ProgramTask = equation.params["task"]
        key = id(called.graph)
        if key not in self.graphs:
            refuse_ordered_effects(called.graph)
            self.graphs[key] = self.onto_submesh(called.graph)
        graph = _with_literals(self.graphs[key], equation.inputs)
        read = [(i, atom) for i, atom in enumerate(equation.inputs) if isinstance(atom, Value)]
        donate = frozenset(p for p, (i, _) in enumerate(read) if i in called.donate)
        self.steps.append(TaskStep(len(self.tasks), [value for _, value in read], equation.outputs))
        self.tasks.append(replace(called, name=self._name(called), graph=graph, donate=donate))
        self.rank.update(dict.fromkeys(equation.outputs, called.rank))

    def _name(self, called: ProgramTask) -> str:
        """Number the tasks of one name on one rank: text and messages tell microbatches apart."""
        name = "_".join(called.name.split())  # one word in text
        number = self.numbers[name, called.rank] = self.numbers.get((name, called.rank), -1) + 1
        return f"{name}.{number}" if number else name

    def transfer(self, equation: Equation) -> None:
        source, target = equation.params["source"], equation.params["target"]
        self.steps.append(TransferStep(source, target, equation.inputs, equation.outputs))
        self.rank.update(dict.fromkeys(equation.outputs, target))


def _with_literals(graph: Graph, operands: Sequence[Atom]) -> Graph:
    """Write the literal operands of a task into its graph."""
    literals: dict[Atom, Atom] = {
        value: atom for value, atom in zip(graph.inputs, operands, strict=True) if isinstance(atom, Constant)
    }
    if not literals:
        return graph
    equations = tuple(e.reading(tuple(literals.get(a, a) for a in e.inputs)) for e in graph.equations)
    inputs = tuple(value for value in graph.inputs if value not in literals)
    return Graph(inputs, tuple(literals.get(a, a) for a in graph.outputs), equations)


@dataclass
class _Donations:
    """The values that tasks reuse by the user's word, and the values that were sent.

    `inputs` tells for each input of the function whether its caller gives its memory away.
    """

    inputs: dict[Value, bool]
    given: dict[Value, str] = field(default_factory=dict)
    sent: set[Value] = field(default_factory=set)

    def check_task(self, equation: Equation) -> None:
        called: ProgramTask = equation.params["task"]
        place = f"task {called.name!r} at {equation.where}"
        self._check_reads(equation.inputs, place)
        for position in sorted(called.donate):
            value = equation.inputs[position]
            if not isinstance(value, Value):
                continue
            what = f"{place} donates its operand {position}, {value.aval.str_short(short_dtypes=True)},"
            if value in self.sent:
                raise ValueError(
                    f"{what} which an earlier transfer sends: the copy may still be reading it. Donate another value, "
                    "or send the result of a task that copies it."
                )
            if equation.inputs.count(value) > 1:
                raise ValueError(f"{what} but reads it twice. Pass it once, or do not donate it.")
            if self.inputs.get(value) is False:
                raise ValueError(
                    f"{what} which is an argument of the mpmd function that the caller keeps. Name the argument in "
                    "`donate_argnums` of `mpmd`, or do not donate it in the task."
                )
            self.given[value] = place

    def check_transfer(self, equation: Equation) -> None:
        self._check_reads(equation.inputs, f"the transfer at {equation.where}")
        self.sent.update(values(equation.inputs))

    def check_results(self, outputs: Sequence[Atom]) -> None:
        for position, atom in enumerate(outputs):
            self._check_reads([atom], f"result leaf {position} of the mpmd function")

    def _check_reads(self, atoms: Sequence[Atom], reader: str) -> None:
        for value in values(atoms):
            if value in self.given:
                raise ValueError(
                    f"{reader} reads {value.aval.str_short(short_dtypes=True)}, which {self.given[value]} has taken "
                    "as a donation. Read it before, or leave it out of that task's donate_argnums."
                )
