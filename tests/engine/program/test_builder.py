"""The builder that every front writes its program with."""

from __future__ import annotations

from jaxpp_flax.engine.program.builder import ProgramBuilder
from jaxpp_flax.engine.program.program import ProgramTask, Run, Transfer
from tests.engine.toys import made


def test_an_edge_is_sent_once_to_each_rank_and_each_run_makes_values_of_its_own():
    here, there = made((2,)), made((2,))
    builder = ProgramBuilder(2)
    builder.argument(here.inputs[0], [0])
    task = builder.task(ProgramTask("here", 0, here))
    builder.run_on(task, here.inputs, here.outputs)
    builder.send([here.outputs[0], here.outputs[0]], 0, 1)
    builder.send([here.outputs[0], here.inputs[0]], 0, 1)
    later = builder.task(ProgramTask("there", 1, there))
    first, second = (builder.run(later, builder.values_of(here.outputs, 1), m) for m in range(2))
    builder.at[there.outputs[0], 1] = second[0]
    builder.result(there.outputs[0], [1])
    program = builder.finish()
    assert [i for i in program.instructions if isinstance(i, Transfer)] == [
        Transfer(0, 1, (1,), (2,)),
        Transfer(0, 1, (0,), (3,)),
    ]
    assert (first, second, program.returned) == ((4,), (5,), {5})


def test_facts_of_a_program():
    graph = made((2,))
    builder = ProgramBuilder(2)
    builder.argument(graph.inputs[0], [0, 1])
    task = builder.task(ProgramTask("task", 0, graph, donate=frozenset({0})))
    index = builder.index(0, 3)
    builder.run_on(task, graph.inputs, graph.outputs, 3)
    builder.send(graph.outputs, 0, 1)
    program = builder.finish()
    assert program.instructions == (Run(0, 3, 0, (0,), (3,)), Transfer(0, 1, (3,), (4,)))
    assert (index, program.preset) == (2, {0: 0, 1: 1, 2: 0})
    assert (program.makers, program.readers) == ({3: (0, 0), 4: (1, 0)}, {0: [0], 3: [1]})
    assert program.ranks == {0: 0, 1: 1, 2: 0, 3: 0, 4: 1}
    assert [program.origin(value) for value in (0, 3, 4)] == [(None, 0), *[(program.instructions[0], 0)] * 2]
    assert program.donated == {0}
