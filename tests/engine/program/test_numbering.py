"""The numbers of a program's values, from the tasks and the transfers that every front emits."""

from __future__ import annotations

import pytest

from jaxpp_flax.engine.program.numbering import TaskStep, TransferStep, numbered, with_transfers
from jaxpp_flax.engine.program.program import ProgramTask, Run, Transfer
from jaxpp_flax.engine.tracing.ir import Value
from tests.engine.toys import made


def test_a_value_is_sent_once_to_each_rank_and_each_run_makes_values_of_its_own():
    here, there = made((2,)), made((2,))
    tasks = [ProgramTask("here", 0, here), ProgramTask("there", 1, there)]
    (sent,), (first, second) = here.outputs, (Value(there.outputs[0].aval) for _ in range(2))
    steps = [
        TaskStep(0, here.inputs, [sent]),
        TransferStep(0, 1, [sent, sent]),
        TransferStep(0, 1, [sent, here.inputs[0]]),
        TaskStep(1, [sent], [first], 0),
        TaskStep(1, [sent], [second], 1),
    ]
    program = numbered(2, tasks, steps, {here.inputs[0]: [0]}, [(second, [1])])
    assert program.instructions == (
        Run(0, -1, 0, (0,), (1,)),
        Transfer(0, 1, (1,), (2,)),
        Transfer(0, 1, (0,), (3,)),
        Run(1, 0, 1, (2,), (4,)),
        Run(1, 1, 1, (2,), (5,)),
    )
    assert program.returned == {5}


def test_arguments_without_ranks_lie_where_they_are_read_and_others_do_not_move():
    graph = made((2,))
    (argument,), (copy,) = graph.inputs, made((2,)).outputs
    tasks = [ProgramTask("task", 1, graph)]
    steps = [TransferStep(0, 1, [argument], [copy]), TaskStep(0, [argument], graph.outputs)]
    program = numbered(2, tasks, steps, {argument: None}, [(copy, [1])])
    assert program.arguments == ({0: 0, 1: 2},)
    assert program.instructions == (Transfer(0, 1, (0,), (1,)), Run(0, -1, 1, (2,), (3,)))
    with pytest.raises(KeyError):
        numbered(2, tasks, steps, {argument: [0]}, [])


def test_facts_of_a_program():
    graph = made((2,))
    index = Value(graph.inputs[0].aval)
    task = ProgramTask("task", 0, graph, donate=frozenset({0}))
    steps = [TaskStep(0, [*graph.inputs, index], graph.outputs, 3), TransferStep(0, 1, graph.outputs)]
    program = numbered(2, [task], steps, {graph.inputs[0]: [0, 1]}, [], {index: 3})
    assert program.instructions == (Run(0, 3, 0, (0, 2), (3,)), Transfer(0, 1, (3,), (4,)))
    assert (program.indices, program.preset) == ({(0, 3): 2}, {0: 0, 1: 1, 2: 0})
    assert (program.makers, program.readers) == ({3: (0, 0), 4: (1, 0)}, {0: [0], 2: [0], 3: [1]})
    assert program.ranks == {0: 0, 1: 1, 2: 0, 3: 0, 4: 1}
    assert [program.origin(value) for value in (0, 3, 4)] == [(None, 0), *[(program.instructions[0], 0)] * 2]
    assert program.donated == {0}


def test_a_value_goes_behind_its_maker_and_an_argument_in_front_of_its_reader():
    graph, other = made((2,)), made((2,))
    (argument,), (value,), (read,) = graph.inputs, graph.outputs, other.outputs
    tasks = [ProgramTask("one", 0, graph), ProgramTask("two", 1, other)]
    runs = [TaskStep(0, [argument], [value]), TaskStep(1, [value, argument], [read])]
    steps = list(with_transfers(runs, tasks, {argument: 2}, [(read, 0), (argument, 1), (value, 0)]))
    moves = [(step.source, step.target, step.sent) for step in steps if isinstance(step, TransferStep)]
    assert moves == [(2, 0, [argument]), (0, 1, [value]), (2, 1, [argument]), (1, 0, [read]), (2, 1, [argument])]
    assert not [s for s in with_transfers(runs[:1], tasks) if isinstance(s, TransferStep)], "nobody else reads it"
