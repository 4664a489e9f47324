"""What cannot run is refused before anything runs, with a message that says what to change."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpp_flax import mpmd
from jaxpp_flax.schedules import ScheduleError, Std1F1B
from jaxpp_flax.schedules.schedule import Schedule
from jaxpp_flax.schedules.task import backward, forward
from tests.mpmd.programs import accumulate, batches, config, in_runs, in_turn, model, topology, weights


def lower(cfg, fun=accumulate, args=None, **kwargs):
    args = (weights(4), batches(4)) if args is None else args
    return mpmd.jit(fun, cfg, **kwargs).lower(*args)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({}, {}), "topology must name at least one mesh"),
        ((None, {}), "topology must name at least one mesh"),
        (({"m0": 3}, {}), r"topology\['m0'\] must be a jax.sharding.Mesh, got int"),
        (([1], {}), "topology must be a mapping"),
        (
            ("two", {"block_0": "m9"}),
            r"'block_0' is assigned to the mesh 'm9', which the topology lacks. Did you mean 'm",
        ),
        (("two", {"block_0": ("m0", "m1")}), r"'block_0' is assigned to 2 meshes \(m0, m1\): a name lives on one"),
        (("two", {"block_0": 1}), "'block_0' must be assigned to the name of a mesh, got 1"),
        (("two", {"block_0": "m0#sram"}), "'sram' is no kind of memory .*Use 'm0#pinned_host' or 'm0#device'"),
        (("two", [("block_0", "m0"), ("block_0", "m1")]), "must be a mapping, so that each name has one mesh"),
    ],
)
def test_topology_and_assignment(arguments, message):
    meshes, assignment = arguments
    meshes = topology(2, 2) if meshes == "two" else meshes
    with pytest.raises((ValueError, TypeError), match=message):
        mpmd.make_config(meshes, assignment)


def test_names_of_meshes():
    with pytest.raises(ValueError, match=r"a mesh cannot be named 'a@b'.*reserved. Rename it"):
        mpmd.make_config({"a@b": topology(1)["m0"]}, {})


def test_explicit_axes():
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",), axis_types=(AxisType.Explicit,))
    with pytest.raises(ValueError, match=r"topology\['m0'\] has axes that are not Auto \(data: Explicit\)"):
        mpmd.make_config({"m0": mesh}, {})


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"name_to_stage_assignment": {"block_0": -1}}, "stage of 'block_0' must be a number from 0, got -1"),
        (
            {"name_to_stage_assignment": {"block_9": 0}},
            "'block_9' is assigned to stage 0, but to no mesh. Did you mean",
        ),
        ({"input_mesh_assignment": ("m7",)}, "an input .* is assigned to the mesh 'm7', which the topology lacks"),
        ({"partitioning_options": {"mpmd_pipeline_schedul": None}}, "Did you mean 'mpmd_pipeline_schedule'"),
        ({"partitioning_options": {"mpmd_infer_transfers": True}}, "or as `output_mesh_assignment` says"),
        (
            {"input_mesh_assignment": ("m0",), "read_input_output_mesh_from_shardings": True},
            "both input_mesh_assignment and read_input_output_mesh_from_shardings",
        ),
        ({"pipeline_schedule": 3}, "pipeline_schedule must be a name or a Schedule, got int"),
        (
            {"partitioning_options": {"mpmd_fragment_remat": True}},
            "unknown partitioning option 'mpmd_fragment_remat'.* Leave out the switches .* change nothing here",
        ),
    ],
)
def test_options(more, message):
    with pytest.raises((ValueError, TypeError), match=message):
        mpmd.make_config(topology(2, 2), in_runs(4, 2), **more)


@pytest.mark.parametrize("name", ["ONE_FWD_ONE_BDW", "1f1b", "ZeroBubble"])
def test_unknown_schedule(name: str):
    for options in ({"partitioning_options": {"mpmd_pipeline_schedule": name}}, {"pipeline_schedule": name}):
        with pytest.raises(ValueError, match=f"unknown schedule '{name}'.*Known: GPIPE, ONE_FWD_ONE_BWD"):
            mpmd.make_config(topology(2, 2), in_runs(4, 2), **options)


def test_a_name_that_is_assigned_to_no_mesh():
    assignment = in_runs(4, 2)
    assignment["blok_3"] = assignment.pop("block_3")
    with pytest.raises(ValueError, match=r"'block_3' at .*programs.py.* is assigned to no mesh. Did you mean 'blok_3'"):
        lower(config(topology(2, 2), assignment))


def test_an_array_that_is_assigned_to_no_mesh():
    with pytest.raises(ValueError, match=r"'hidden' at .* is assigned to no mesh"):
        lower(config(topology(1, 1), {"a": "m0"}), lambda x: mpmd.named_tensor(x, "hidden"), (jnp.ones(3),))


def test_a_computation_inside_of_another_on_another_mesh():
    def fun(x):
        inner = mpmd.named_computation(lambda x: x * 2, name="inner")
        return mpmd.named_computation(lambda x: inner(x + 1), name="outer")(x)

    meshes = topology(1, 1)
    with pytest.raises(ValueError, match=r"'inner' is inside of 'outer' at .*, but assigned elsewhere: 'm1', not 'm0'"):
        lower(config(meshes, {"inner": "m1", "outer": "m0"}), fun, (jnp.ones(3),))
    lowered = lower(config(meshes, {"inner": "m0", "outer": "m0"}), fun, (jnp.ones(3),))
    assert lowered.as_text("mpmd").count(" = ") == 1


def test_names_of_several_meshes_inside_of_a_scan():
    def fun(ws, x):
        return jax.lax.scan(lambda x, _: (model(ws, x), None), x, None, length=2)[0]

    args = (weights(2), batches(1)[0])
    message = "'block_0', 'block_1' stand inside of one `scan` at .* on several meshes .*Use `mpmd.fori_loop`"
    with pytest.raises(ValueError, match=message):
        lower(config(topology(1, 1), in_runs(2, 2)), fun, args)
    one = lower(config(topology(1, 1), {"block_0": "m1", "block_1": "m1"}), fun, args)  # on one mesh it is one program
    np.testing.assert_allclose(one.compile()(*args), jax.jit(fun)(*args), rtol=1e-5)


@pytest.mark.parametrize("schedule", ["ONE_FWD_ONE_BWD", "ZERO_BUBBLE_H1", "GPIPE_BUT_1F1B_FOR_LAST_MESH"])
def test_several_stages_on_one_mesh(schedule: str):
    message = (
        rf"{schedule} is for 4 stages on 4 meshes, .* 4 stages on 2: stage 0 \(block_0\) on 'm0'; stage 1 .* GPIPE"
    )
    with pytest.raises(ScheduleError, match=message):
        lower(config(topology(1, 1), in_turn(4, 2), schedule))


def test_stages_in_another_order_than_the_schedule_deals_them():
    assignment = {"block_0": "m0", "block_1": "m1", "block_2": "m1", "block_3": "m0"}
    stages = {f"block_{i}": i for i in range(4)}
    with pytest.raises(
        ScheduleError, match=r"does not fit CIRCULAR: it wants stage 2 on mesh 'm0', but stage 2 .block_2"
    ):
        lower(config(topology(1, 1), assignment, "CIRCULAR", name_to_stage_assignment=stages))


def test_stages_that_cannot_be_dealt_out():
    with pytest.raises(ScheduleError, match="num_stages=3 cannot be divided evenly"):
        lower(config(topology(1, 1), in_turn(3, 2), "CIRCULAR"), args=(weights(3), batches(2)))


def test_a_schedule_for_other_numbers():
    cfg = mpmd.make_config(topology(1, 1), in_runs(4, 2), pipeline_schedule=Std1F1B(3))
    with pytest.raises(ScheduleError, match="Std1F1B is for 3 stages on 3 meshes, but the program has 2 stages on 2"):
        lower(cfg)


def test_a_stage_that_its_own_microbatch_leaves_and_enters_again():
    """Blocks 0 and 2 in one stage, block 1 on another mesh between them: a circle of two tasks."""
    cfg = config(
        topology(1, 1),
        {"block_0": "m0", "block_1": "m1", "block_2": "m0"},
        "ONE_FWD_ONE_BWD",
        name_to_stage_assignment={"block_0": 0, "block_1": 1, "block_2": 0},
    )
    with pytest.raises(ScheduleError, match="cannot run by ONE_FWD_ONE_BWD: its computations wait for each other in a"):
        lower(cfg, args=(weights(3), batches(3)))


def test_a_schedule_that_deadlocks():
    class BackwardFirst(Schedule):
        def tasks(self, num_microbatches: int):
            first = [forward(0, 0), backward(0, 0)]
            return [first, [backward(1, 0), forward(1, 0)]]

    cfg = mpmd.make_config(topology(1, 1), in_runs(2, 2), pipeline_schedule=BackwardFirst(2))
    with pytest.raises(ScheduleError, match="deadlock"):
        lower(cfg, args=(weights(2), batches(1)))


def test_shardings_that_no_mesh_can_follow():
    cfg = config(topology(2, 2), in_runs(4, 2))
    stranger = NamedSharding(Mesh(np.array(jax.devices()[:4]), ("other",)), P("other"))
    with pytest.raises(ValueError, match=r"in_shardings\[1\] is over a mesh with axes {'other': 4}, but no mesh"):
        lower(cfg, in_shardings=(None, stranger))
    with pytest.raises(ValueError, match=r"argument\[1\]\[0\] is to be partitioned by .*'model'.* lives on mesh 'm0'"):
        lower(cfg, in_shardings=(None, P("model")))
    elsewhere = NamedSharding(cfg.sharding_mesh, P(), memory_kind="unpinned_host")
    with pytest.raises(ValueError, match=r"in_shardings has the memory kind 'unpinned_host'.*pinned_host"):
        lower(cfg, in_shardings=elsewhere)
    with pytest.raises(ValueError, match=r"out_shardings has the memory kind 'unpinned_host'"):
        lower(cfg, out_shardings=elsewhere)
    with pytest.raises(ValueError, match="out_shardings is not a prefix of the tree"):
        lower(cfg, out_shardings=(None, None, None))
    with pytest.raises(TypeError, match=r"in_shardings must be a NamedSharding or a PartitionSpec, got Single"):
        lower(cfg, in_shardings=jax.sharding.SingleDeviceSharding(jax.devices()[0]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mpmd.named_computation(lambda x: x, name="main"), "cannot be named 'main'"),
        (lambda: mpmd.named_computation(lambda x: x, name="partir.x"), "cannot be named 'partir.x'"),
        (lambda: mpmd.named_computation(lambda x: x, name=3), "name must be a string, got 3"),
        (lambda: mpmd.named_computation(lambda x: x, name="a", transpose_count=-1), "transpose_count of 'a' must be 0"),
        (lambda: mpmd.call(lambda x: x, call_counter=-1), "call_counter must be 0 or more, got -1"),
        (lambda: mpmd.fori_loop(2, lambda i, x: (x, x), jnp.ones(2)), "must have the same pytree structure"),
        (lambda: mpmd.fori_loop(2, lambda i, x: {"a": x["a"][:1]}, {"a": jnp.ones(2)}), r"carry\[1\]\['a'\] has type"),
        (lambda: mpmd.enumerated_for(lambda c, i, x: c, 0.0, 1.0), "leaf of `inputs` at the top is of type float"),
        (lambda: mpmd.enumerated_for(lambda c, i, x: c, 0.0, {"a": [1.0], "b": [1.0, 2.0]}), "sequences of one length"),
        (lambda: mpmd.jit(lambda x: x, {"m0": None}), "mpmd_config must come from `mpmd.make_config`, got dict"),
        (lambda: mpmd.flax.named_computation(lambda x: x, name="a"), "takes a class of Flax modules"),
        (lambda: mpmd.unknown, "has no attribute 'unknown'"),
    ],
)
def test_annotations(make, message):
    with pytest.raises((ValueError, TypeError, AttributeError), match=message):
        make()


def test_arguments_of_a_compiled_program():
    ws, xs = weights(4), batches(2)
    compiled = mpmd.jit(accumulate, config(topology(2, 2), in_runs(4, 2)), donate_argnums=0).lower(ws, xs).compile()
    with pytest.raises(TypeError, match=r"of another structure than it was made for: missing argument\[1\]\[1\]"):
        compiled(ws, xs[:1])
    with pytest.raises(TypeError, match=r"argument\[1\]\[0\]: got float32\[2, 8\], made for float32\[4, 8\]"):
        compiled(ws, [x[:2] for x in xs])
    shape = jax.ShapeDtypeStruct(ws[0].shape, ws[0].dtype)
    with pytest.raises(TypeError, match=r"argument\[0\]\[0\] is a shape without a value .*an argument that no rank"):
        compiled([shape, *ws[1:]], xs)
    compiled(ws, xs)
    assert all(w.is_deleted() for w in ws)
    with pytest.raises(RuntimeError, match=r"argument\[0\]\[0\] of accumulate has been deleted"):
        compiled(ws, xs)
    others = weights(4)
    xs[1].delete()
    with pytest.raises(RuntimeError, match=r"argument\[1\]\[1\] of accumulate has been deleted"):
        compiled(others, xs)
    assert not any(w.is_deleted() for w in others)  # nothing is donated beside an argument that is refused
    with pytest.raises(TypeError, match=r"argument\[0\] is a str, which is no array"):
        lower(config(topology(2, 2), {}), lambda x: x, ("text",))
    with pytest.raises(ValueError, match="as_text knows no dialect 'ifrt'"):
        compiled.as_text("ifrt")
