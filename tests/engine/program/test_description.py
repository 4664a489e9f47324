"""Programs in words: equal for equal programs, different where anything that matters differs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core as jex_core
from jax.sharding import PartitionSpec

from jaxpp_flax.engine.program.description import describe_graph, describe_program
from jaxpp_flax.engine.runtime.startup import start
from jaxpp_flax.engine.runtime.transport.connection import DistributedProgram
from jaxpp_flax.engine.tracing.ir import Constant, Graph, from_jaxpr
from jaxpp_flax.processes import BarrierTimeoutError, ProcessGroup
from jaxpp_flax.processes.comparison import ProgramMismatchError, ValuesMismatchError, compare_lines
from jaxpp_flax.schedules import GPipe, Std1F1B
from tests.engine.stores import MemoryStore, in_parallel
from tests.engine.toys import built, chain, chain_loss, sgd_step
from tests.helpers import batch_of


def lines(schedule: Any = None, dim: int = 8, microbatches: int = 4, loss: Any = None) -> list[str]:
    step = sgd_step(schedule or GPipe(2), *([loss] if loss else []))
    program = built(step, 2, chain(2, dim), batch_of(microbatches, dim=dim)).program
    none = [PartitionSpec()] * len(program.arguments)
    return describe_program(program, none, [None] * len(program.results))


def test_equal_programs_read_the_same():
    first = lines()
    jax.clear_caches()
    assert lines() == first


@pytest.mark.parametrize("change", [{"schedule": Std1F1B(2)}, {"dim": 16}, {"microbatches": 6}], ids=str)
def test_a_change_shows(change: dict[str, Any]):
    assert lines(**change) != lines()


def test_a_changed_dtype_or_partition_shows():
    step, batch = sgd_step(GPipe(2)), batch_of(4)
    program = built(step, 2, chain(2), batch).program
    arguments, results = len(program.arguments), len(program.results)
    plain = describe_program(program, [PartitionSpec()] * arguments, [None] * results)
    cut = PartitionSpec("data")
    assert describe_program(program, [PartitionSpec()] * (arguments - 1) + [cut], [None] * results) != plain
    assert describe_program(program, [PartitionSpec()] * arguments, [None] * (results - 1) + [cut]) != plain
    narrow = built(step, 2, jax.tree.map(lambda p: p.astype(jnp.bfloat16), chain(2)), batch).program
    assert describe_program(narrow, [PartitionSpec()] * arguments, [None] * results) != plain


def test_a_changed_constant_inside_a_call_shows():
    def loss_with(factor: float) -> Any:
        inner = jax.jit(lambda x: x * factor)

        def loss(params: Any, batch: Any) -> Any:
            return inner(chain_loss(params, batch))

        return loss

    assert lines(loss=loss_with(2.0)) == lines(loss=loss_with(2.0))
    assert lines(loss=loss_with(2.0)) != lines(loss=loss_with(3.0))


CALLS: dict[str, Any] = {
    "jit": jax.jit,
    "jit in jit": lambda f: jax.jit(lambda x: jax.jit(f)(x) + 1),
    "cond in jit": lambda f: jax.jit(lambda x: jax.lax.cond(x[0] > 0, f, lambda x: x, x)),
    "scan in jit": lambda f: jax.jit(lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0]),
}


def calling(call: Any, constant: Any) -> str:
    """A function that closes over an array in an inner call, as the processes compare it."""
    graph, _ = from_jaxpr(jax.make_jaxpr(call(lambda x: x + constant))(jnp.zeros(constant.shape)))
    return "\n".join(describe_graph(graph))


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_an_array_that_an_inner_call_closes_over_shows(call: Any):
    """It is long, so that its text would leave out where the two differ."""
    first = jnp.zeros(5000)
    second = jnp.asarray(np.where(np.arange(5000) == 2500, 1e-7, 0.0), jnp.float32)
    assert calling(call, first) == calling(call, jnp.asarray(np.zeros(5000, np.float32)))
    assert calling(call, first) != calling(call, second)


def test_a_parameter_called_name_shows_where_it_is_not_a_calls():
    mine = jex_core.Primitive("mine")
    mine.def_abstract_eval(lambda x, **_: x)

    def lines_of(**params: Any) -> list[str]:
        return list(describe_graph(from_jaxpr(jax.make_jaxpr(lambda x: mine.bind(x, **params))(1.0))[0]))

    assert lines_of(name="a") != lines_of(name="b")


def test_the_type_of_a_literal_shows():
    """Two processes that return 1 as an integer and as a float are not equal."""
    whole, broken = (
        list(describe_graph(Graph((), (Constant(1, jax.core.ShapedArray((), dtype)),), ())))
        for dtype in (jnp.int32, jnp.float32)
    )
    assert whole != broken


def test_no_addresses_and_no_folders():
    def loss(params: Any, batch: Any) -> Any:
        return jnp.sum(jax.nn.relu(chain_loss(params, batch)))  # a custom_jvp holds functions

    text = "\n".join(lines(loss=loss))
    assert "custom_jvp" in text or "relu" in text or "max" in text
    assert " at 0x" not in text
    assert "/tests/" not in text


class Solver:
    """An object whose text has its address, as a host callback's has."""


@pytest.mark.parametrize(
    "made", [lambda: lambda x: x, Solver, lambda: partial(print, Solver())], ids=["function", "object", "partial"]
)
def test_objects_of_two_processes_read_the_same(made: Any):
    def text(function: Any) -> str:
        graph, _ = from_jaxpr(
            jax.make_jaxpr(lambda x: jax.pure_callback(function, x, x, vmap_method="sequential"))(1.0)
        )
        (equation,) = graph.equations
        graph = Graph(
            graph.inputs, graph.outputs, (replace(equation, params={**equation.params, "callback": function}),)
        )
        return "\n".join(describe_graph(graph))

    one, other = made(), made()
    assert one is not other
    assert text(one) == text(other)
    assert "0x" not in text(one)


def together(*programs: list[str]) -> list[Any]:
    """What `agree` gives or raises in each of several processes."""
    store = MemoryStore()

    def one(index: int) -> Any:
        try:
            return compare_lines(ProcessGroup(store, index, len(programs)), "program 1", programs[index], 10.0)
        except ProgramMismatchError as error:
            return error

    return in_parallel([partial(one, index) for index in range(len(programs))])


def test_processes_agree():
    first, second = together(["a", "b"], ["a", "b"])
    assert first == second != together(["a", "c"], ["a", "c"])[0]


@pytest.mark.parametrize(("last", "shown"), [(["a", "x", "c"], "process 2: x"), (["a"], "process 2: \\(its program")])
def test_the_first_difference_is_named_with_the_process(last: list[str], shown: str):
    for error in together(["a", "b", "c"], ["a", "b", "c"], last):
        assert isinstance(error, ProgramMismatchError)
        with pytest.raises(ProgramMismatchError, match=rf"(?s)program 1.*processes 0, 1: b.*{shown}"):
            raise error


def started(store: MemoryStore, index: int, count: int, constant: float, seconds: float) -> Any:
    """What `start` raises in a process with this constant, or None."""
    settings = SimpleNamespace(start_timeout=seconds)
    connection: Any = SimpleNamespace(
        group=ProcessGroup(store, index, count), settings=settings, connect=lambda parcels: None
    )
    try:
        return start(DistributedProgram(connection, "program 1", "p"), [], {"constant 0": jnp.full(3, constant)})
    except (BarrierTimeoutError, ValuesMismatchError) as error:
        return error


def test_who_is_missing_at_the_start_is_named_after_the_deadline():
    error = started(MemoryStore(), 0, 3, 1.0, 0.3)
    with pytest.raises(BarrierTimeoutError, match=r"processes 1, 2 of 3 did not come to 'the start of program 1'"):
        raise error


def test_constants_are_compared_at_the_start():
    store = MemoryStore()
    assert in_parallel([partial(started, store, index, 2, 1.0, 10.0) for index in range(2)]) == [None, None]
    store = MemoryStore()
    for error in in_parallel([partial(started, store, index, 2, float(index), 10.0) for index in range(2)]):
        with pytest.raises(ValuesMismatchError, match=r"different values of the constants of program 1.*constant 0"):
            raise error
