"""What bad input gets: a builtin error before anything runs, that says what, where and what to change."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

from jaxpp_flax.engine.jit import mpmd_jit, mpmd_jit_with_loop
from jaxpp_flax.engine.runtime.instruction_loop import Runtime
from jaxpp_flax.engine.tracing.markers import mark_stage_end
from jaxpp_flax.engine.tracing.treduce import Add, Concat, Last, treduce, treduce_i
from jaxpp_flax.schedules import CustomSchedule, Interleaved1F1B, Schedule, ScheduleError, Std1F1B
from jaxpp_flax.schedules.task import Task, TaskKind
from tests.engine.toys import chain, chain_loss, gradients, mesh_of, sgd_step
from tests.helpers import batch_of
from tests.running import ROOT

pytestmark = pytest.mark.usefixtures("nothing_runs")

HERE = Path(__file__).name
BUILTIN = (ValueError, TypeError, RuntimeError)


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if a pipelined step starts."""

    def run(*_: Any) -> None:
        pytest.fail("a task ran before the error was raised")

    monkeypatch.setattr(Runtime, "run", run)


def refused(error: type[Exception], call: Callable[[], Any], *says: str, line_of: str | None = None) -> str:
    """Check the error of a call: its type, its words, its length, and the user's line where it names one.

    `line_of` is a piece of this file's source: the message must name this file and the line that holds it.
    """
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert issubclass(error, BUILTIN)
    for words in says:
        assert words in message, message
    assert len(message) < 1000, message
    # What a printed jaxpr, an equation or a traceback through the package would show.
    assert not re.search(r"lambda ;|\{ ?lambda|\bin \(|:f32\[|:i32\[|Var\(id", message), message
    inside = message.replace(f"{ROOT}/", "")  # the checkout may be a folder of the package's name
    assert not re.search(r"jaxpp_flax/|(?<!tests/)engine/\w+\.py", inside), message
    if line_of is not None:
        lines = [
            n for n, text in enumerate(Path(__file__).read_text(encoding="utf-8").splitlines(), 1) if line_of in text
        ]
        named = [int(n) for n in re.findall(rf"{re.escape(HERE)}:(\d+)", message)]
        assert named, f"no line of {HERE} is named in: {message}"
        assert set(named) & set(lines), f"lines {named} are named, {lines} hold {line_of!r}: {message}"
    return message


def pipelined(step: Callable[..., Any], num_ranks: int = 2) -> Callable[..., Any]:
    return mpmd_jit_with_loop(step, mesh_of(num_ranks))


# --- the batch -------------------------------------------------------------------------------------------------------


def test_leaves_with_different_numbers_of_microbatches():
    batch = {**batch_of(4), "y": batch_of(3)["y"]}
    refused(
        ValueError,
        lambda: pipelined(gradients(Std1F1B(2)))(chain(2), batch),
        "number of microbatches", "xs['x']: 4", "xs['y']: 3", "Give every leaf the same size",
    )  # fmt: skip


def test_a_leaf_without_the_axis_of_microbatches():
    batch = {**batch_of(4), "scale": jnp.float32(1)}
    refused(ValueError, lambda: pipelined(gradients(Std1F1B(2)))(chain(2), batch), "xs['scale']", "no axis 0")


def test_a_batch_without_arrays():
    refused(ValueError, lambda: pipelined(gradients(Std1F1B(2)))(chain(2), {}), "without a single array")


def test_no_microbatches():
    refused(ValueError, lambda: treduce_i(lambda i: i, 0, operation=Add), "at least one microbatch", "length=0")


# --- the marks -------------------------------------------------------------------------------------------------------


def test_fewer_marks_than_stages():
    refused(
        ValueError,
        lambda: pipelined(gradients(Std1F1B(4)), 4)(chain(2), batch_of(4)),
        "4 stages needs 3 marks", "holds 1", "layer_0 at", "Add marks",
    )  # fmt: skip


def test_more_marks_than_stages_shows_where_the_first_ones_are():
    def loss(params: Any, mb: Any) -> jax.Array:
        x = mb["x"]
        for i in range(30):
            x = mark_stage_end(x, f"a_layer_with_a_rather_long_name_{i}")  # one of thirty
        return jnp.mean((x @ params) ** 2)

    refused(
        ValueError,
        lambda: pipelined(gradients(Std1F1B(2), loss))(jnp.eye(8), batch_of(2)),
        "2 stages needs 1 mark", "holds 30", "a_layer_with_a_rather_long_name_0", "and 25 more", "cut_policy=",
        line_of="# one of thirty",
    )  # fmt: skip


def test_a_mark_without_arrays():
    refused(ValueError, lambda: mark_stage_end({"name": "text"}, "encoder"), "no array to mark", "'encoder'", "str")


@pytest.mark.parametrize("how", ["io_callback", "debug"])
def test_side_effects_in_one_order_over_the_stages(how: str):
    def loss(params: Any, mb: Any) -> jax.Array:
        x = mark_stage_end(mb["x"] @ params)
        if how == "io_callback":
            io_callback(print, None, 1, ordered=True)  # ordered: io_callback
        else:
            jax.debug.print("{}", x.sum(), ordered=True)  # ordered: debug
        return jnp.mean(x**2)

    refused(
        ValueError,
        lambda: pipelined(gradients(Std1F1B(2), loss))(jnp.eye(8), batch_of(2)),
        "ordered=True", "no order of the whole step is kept", "Leave out ordered=True",
        line_of=f"# ordered: {how}",
    )  # fmt: skip


def test_a_cut_policy_that_counts_wrong():
    step = mpmd_jit_with_loop(gradients(Std1F1B(3)), mesh_of(3), cut_policy=lambda marks, stages: [1, 0])
    refused(ValueError, lambda: step(chain(3), batch_of(3)), "[1, 0]", "2 different indices in ascending order")


def in_scan(params: Any, mb: Any) -> jax.Array:
    def layer(x: jax.Array, w: jax.Array) -> Any:
        return mark_stage_end(jnp.tanh(x @ w)), None

    x, _ = jax.lax.scan(layer, mb["x"], params)  # marked layers
    return jnp.mean((x - mb["y"]) ** 2)


def in_cond(params: Any, mb: Any) -> jax.Array:
    x = jax.lax.cond(mb["x"].sum() > 0, lambda x: mark_stage_end(x @ params[0]), lambda x: x, mb["x"])  # marked branch
    return jnp.mean((x - mb["y"]) ** 2)


def in_while(params: Any, mb: Any) -> jax.Array:
    def double(x: jax.Array) -> jax.Array:
        return mark_stage_end(x * 2)

    x = jax.lax.while_loop(lambda x: x.sum() < 1, double, mb["x"])  # marked loop
    return jnp.mean((x @ params[0] - mb["y"]) ** 2)


@pytest.mark.parametrize(
    ("loss", "construct", "line"),
    [
        (in_scan, "`scan`", "# marked layers"),
        (in_cond, "`cond`", "# marked branch"),
        (in_while, "`while`", "# marked loop"),
    ],
    ids=["scan", "cond", "while"],
)
@pytest.mark.parametrize("differentiate", [False, True], ids=["forward", "gradient"])
def test_a_mark_inside_control_flow(loss: Callable[..., jax.Array], construct: str, line: str, differentiate: bool):
    def step(params: Any, batch: Any) -> Any:
        if differentiate and loss is not in_while:  # a while loop has no reverse mode
            return gradients(Std1F1B(2), loss)(params, batch)
        return treduce(lambda mb: loss(params, mb), batch, Std1F1B(2), operation=Add)

    params = jnp.stack([jnp.eye(8)] * 2)
    remedy = {"`scan`": "Give each stage a scan", "`cond`": "in front of or behind", "`while`": "out of the loop"}
    refused(
        ValueError,
        lambda: pipelined(step)(params, batch_of(2)),
        construct,
        "stage marker",
        remedy[construct],
        line_of=line,
    )


def test_a_mark_in_forward_mode():
    def step(params: Any, batch: Any) -> Any:
        def body(mb: Any) -> Any:
            return jax.jvp(lambda p: chain_loss(p, mb), (params,), (params,))[1]

        return treduce(body, batch, Std1F1B(2), operation=Add)

    refused(
        ValueError,
        lambda: pipelined(step)(chain(2), batch_of(2)),
        "forward mode", "reverse mode", "jax.jvp",
    )  # fmt: skip


def test_a_loop_inside_control_flow():
    def step(params: Any, batch: Any) -> Any:
        def train(params: Any) -> Any:
            return treduce(lambda mb: chain_loss(params, mb), batch, Std1F1B(2), operation=Add)

        return jax.lax.cond(batch["x"].sum() > 0, train, lambda _: jnp.float32(0), params)  # loop in a branch

    refused(
        ValueError, lambda: pipelined(step)(chain(2), batch_of(2)), "treduce", "`cond`", line_of="# loop in a branch"
    )


# --- mesh and schedule -----------------------------------------------------------------------------------------------


def test_no_loop_in_the_step():
    refused(
        ValueError,
        lambda: pipelined(chain_loss)(chain(2), jax.tree.map(lambda x: x[0], batch_of(2))),
        "no `treduce`", "Wrap the work of one microbatch", "mpmd_jit",
    )  # fmt: skip


def test_a_loop_without_schedule():
    def step(params: Any, batch: Any) -> Any:
        return treduce(lambda mb: jax.value_and_grad(chain_loss)(params, mb), batch)  # no schedule here

    refused(
        ValueError, lambda: pipelined(step)(chain(2), batch_of(2)),
        "no schedule", "schedule=Std1F1B(2)", line_of="# no schedule here",
    )  # fmt: skip


def test_a_schedule_by_name():
    def step(params: Any, batch: Any) -> Any:
        return treduce(lambda mb: jax.value_and_grad(chain_loss)(params, mb), batch, "1f1b")  # a name  # type: ignore

    refused(TypeError, lambda: pipelined(step)(chain(2), batch_of(2)), "'1f1b'", "str", "by_name", line_of="# a name")


def test_a_schedule_for_another_number_of_ranks():
    def step(params: Any, batch: Any) -> Any:
        return treduce(lambda mb: chain_loss(params, mb), batch, Std1F1B(4), operation=Add)  # four ranks

    refused(
        ValueError, lambda: pipelined(step, 2)(chain(4), batch_of(4)),
        "Std1F1B", "4 ranks", "mesh has 2", "mpmd_dim", line_of="# four ranks",
    )  # fmt: skip


@dataclass(frozen=True, init=False)
class OwnOrder(Schedule):
    """A user's schedule, from a list of the tasks of its two ranks."""

    lists: Any = ()

    def __init__(self, *lists: list[Task]) -> None:
        super().__init__(2)
        object.__setattr__(self, "lists", tuple(map(tuple, lists)))

    def tasks(self, num_microbatches: int) -> list[list[Any]]:
        return list(map(list, self.lists))


def own_order(*ranks: str) -> OwnOrder:
    """From cells such as "0F1": stage, kind, microbatch."""
    return OwnOrder(*([Task(TaskKind(cell[1]), int(cell[0]), int(cell[2])) for cell in row.split()] for row in ranks))


def test_a_schedule_that_does_not_fit_the_microbatches():
    schedule = CustomSchedule(Std1F1B(2).tasks(2))
    refused(
        ValueError, lambda: pipelined(gradients(schedule))(chain(2), batch_of(3)),
        "written for 2 microbatches, got 3", "num_microbatches=2",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("schedule", "says"),
    [
        (own_order("0F0 0F1 0B0", "1F0 1B0 1F1 1B1"), "runs bwd_0 for the microbatches [0]; each task"),
        (own_order("1F0 1F1 1B0 1B1", "0F0 0F1 0B0 0B1"), "`rank_of`"),
        (own_order("0F0 0F1 0B0 0B1", "1B0 1F0 1F1 1B1"), "deadlock"),
    ],
    ids=["missing", "elsewhere", "deadlock"],
)
def test_a_schedule_of_ones_own_that_is_none(schedule: OwnOrder, says: str):
    refused(ValueError, lambda: pipelined(gradients(schedule))(chain(2), batch_of(2)), says)


def test_a_schedule_out_of_order_where_order_matters():
    backwards = own_order("0F0 0F1 0B1 0B0", "1F0 1F1 1B1 1B0")

    def with_carry(params: Any, batch: Any) -> Any:
        def body(best: Any, mb: Any) -> Any:
            loss, grads = jax.value_and_grad(chain_loss)(params, mb)
            return jnp.maximum(best, grads[1]["b"].max()), (loss, grads)

        return treduce(body, batch, backwards, init=jnp.float32(0))

    def with_last(params: Any, batch: Any) -> Any:
        return treduce(lambda mb: jax.grad(chain_loss)(params, mb), batch, backwards, operation=Last)

    for step in (with_carry, with_last):
        refused(ValueError, lambda step=step: pipelined(step)(chain(2), batch_of(2)), "[1, 0]", "in order")
    # A sum does not mind.
    pipelined(gradients(backwards)).compile(chain(2), batch_of(2))


def test_a_schedule_that_does_not_fit_the_stages():
    assert issubclass(ScheduleError, ValueError)
    refused(ScheduleError, lambda: Interleaved1F1B(5, 2), "num_stages=5", "num_ranks=2", "Use 4 or 6 stages")


def test_no_mesh():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("stage",))
    refused(TypeError, lambda: mpmd_jit_with_loop(chain_loss, mesh), "MpmdMesh", "Mesh", "MpmdMesh(jax_mesh")
    refused(TypeError, lambda: mpmd_jit(chain_loss, mesh), "MpmdMesh", "Mesh", "MpmdMesh(jax_mesh")


# --- the loop's results and carry ------------------------------------------------------------------------------------


def test_operations_that_do_not_fit_the_results():
    def step(params: Any, batch: Any) -> Any:
        return treduce(lambda mb: chain_loss(params, mb), batch, Std1F1B(2), operation=(Concat(), Add))

    refused(ValueError, lambda: pipelined(step)(chain(2), batch_of(2)), "not a prefix", "operation=Add")


@pytest.mark.parametrize("operation", [Concat, "sum"], ids=str)
def test_an_operation_that_is_none(operation: Any):
    refused(
        TypeError,
        lambda: treduce(lambda x: x, jnp.ones((2, 2)), operation=operation),
        repr(operation), "use Add, Concat(axis), Max, Last",
    )  # fmt: skip


def test_a_carry_that_changes_its_type():
    def body(carry: Any, x: Any) -> Any:
        return {"count": carry["count"] + 0.5}, x

    refused(
        TypeError,
        lambda: treduce(body, jnp.ones((2, 2)), operation=Add, init={"count": jnp.int32(0)}),
        "['count']", "int32[]", "float32[]", "Cast, reshape or reshard",
    )  # fmt: skip


def test_a_carry_that_changes_its_structure():
    refused(
        TypeError,
        lambda: treduce(lambda c, x: ((c, c), x), jnp.ones((2, 2)), operation=Add, init=jnp.int32(0)),
        "changes its structure",
    )


def test_a_body_with_carry_that_returns_no_pair():
    refused(
        TypeError,
        lambda: treduce(lambda c, x: x, jnp.ones((2, 2)), operation=Add, init=jnp.int32(0)),
        "pair (carry, result)",
    )


def test_a_carry_that_flows_against_the_pipeline():
    """Read by the first stage's forward, written from its gradient."""

    def step(params: Any, scale: Any, batch: Any) -> Any:
        def body(scale: Any, mb: Any) -> Any:
            def loss(params: Any) -> jax.Array:
                x = {**mb, "x": mb["x"] * scale}  # the carry is read
                return chain_loss(params, x)

            value, grads = jax.value_and_grad(loss)(params)
            return scale + grads[0]["b"], (value, grads)

        return treduce(body, batch, Std1F1B(2), init=scale)

    refused(
        ValueError, lambda: pipelined(step)(chain(2), jnp.ones(8), batch_of(2)),
        "carry", "forward of stage 0", "backward of stage 0", "Read and write", line_of="# the carry is read",
    )  # fmt: skip


def test_differentiating_or_mapping_the_loop():
    def reduced(w: Any) -> jax.Array:
        return treduce(lambda x: jnp.sum(x * w), jnp.ones((2, 3)), operation=Add)

    refused(TypeError, lambda: jax.grad(reduced)(jnp.ones(3)), "differentiated from outside", "Differentiate its body")
    refused(TypeError, lambda: jax.vmap(reduced)(jnp.ones((2, 3))), "vmapped from outside", "inside its body")


# --- arguments -------------------------------------------------------------------------------------------------------


def test_an_argument_that_is_no_array():
    def step(params: Any, batch: Any, mode: Any) -> Any:
        return gradients(Std1F1B(2))(params, batch)

    refused(TypeError, lambda: pipelined(step)(chain(2), batch_of(2), "train"), "argument[2]", "str", "static_argnums")


def test_other_arguments_than_a_step_was_compiled_for():
    """Compared leaf by leaf, before anything runs."""
    step = pipelined(gradients(Std1F1B(2))).compile(chain(2), batch_of(2))
    params, batch = chain(2), batch_of(2)
    refused(
        TypeError, lambda: step(params, batch_of(3)),
        "argument[1]['x']: got float32[3, 16, 8], made for float32[2, 16, 8]", "argument[1]['y']",
        "Make it again",
    )  # fmt: skip
    other = [params[0], {**params[1], "b": np.zeros(8, np.int32)}]
    message = refused(TypeError, lambda: step(other, batch), "argument[0][1]['b']: got int32[8], made for float32[8]")
    assert "['w']" not in message, "only what differs is listed"
    refused(TypeError, lambda: step(params, {"x": batch["x"]}), "missing argument[1]['y']")
    refused(TypeError, lambda: step(params, {**batch, "z": 1}), "unexpected argument[1]['z']")
    refused(
        TypeError, lambda: step(params, batch=batch), "missing argument[1]['x']", "unexpected argument['batch']['x']"
    )
    refused(TypeError, lambda: step(tuple(params), batch), "the containers differ")
    refused(TypeError, lambda: step(params, {**batch, "x": "text"}), "argument[1]['x']", "str")


def test_specs_that_do_not_fit():
    P = jax.sharding.PartitionSpec
    call = lambda **kw: lambda: mpmd_jit_with_loop(gradients(Std1F1B(2)), mesh_of(2), **kw)(chain(2), batch_of(2))  # noqa: E731
    refused(ValueError, call(in_specs=(P("data"), None)), "in_specs", "'data'", "no axis")
    refused(ValueError, call(out_specs=(P(), P(), P())), "out_specs", "not a prefix")
    refused(ValueError, call(in_specs=(P(), P()), in_shardings=(P(), P())), "in_specs", "in_shardings", "one of them")


def test_shardings_of_nothing():
    step = mpmd_jit_with_loop(sgd_step(Std1F1B(2)), mesh_of(2))
    refused(RuntimeError, lambda: step.in_shardings, "nothing is compiled")
