"""A traced, a lowered and a compiled program: what each says, and with which options and arguments it runs."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpp_flax import mpmd
from tests.helpers import tree_allclose
from tests.mpmd.programs import WIDTH, batches, config, in_runs, loss, model, topology, train_step, weights

BLOCKS = 2


def gradients(ws, x):
    return jax.value_and_grad(loss)(ws, x)


@pytest.fixture(scope="module")
def meshes():
    return topology(2, 2)


@pytest.fixture(scope="module")
def lowered(meshes):
    return mpmd.jit(model, config(meshes, in_runs(BLOCKS, 2))).lower(weights(BLOCKS), batches(1)[0])


@pytest.fixture(scope="module")
def compiled(lowered):
    return lowered.compile()


def test_a_traced_function(meshes):
    args = weights(BLOCKS), batches(1)[0]
    traced = mpmd.jit(model, config(meshes, in_runs(BLOCKS, 2)), override_func_name="renamed").trace(*args)
    assert traced.fun_name == "renamed"
    assert (traced.out_info.shape, traced.out_info.dtype) == ((4, WIDTH), jnp.float32)
    assert len(traced.jaxpr.jaxpr.invars if hasattr(traced.jaxpr, "jaxpr") else traced.jaxpr.invars) == BLOCKS + 1
    lowered = traced.lower()
    assert lowered.out_info.shape == (4, WIDTH)
    tree_allclose(lowered.compile()(*args), jax.jit(model)(*args))


def test_shardings_are_enough_to_place_the_arguments(meshes, lowered, compiled):
    assert lowered.topology == meshes
    assert isinstance(lowered.function_mesh_assignment, mpmd.FunctionIOMeshAssignment)
    assert lowered.function_mesh_assignment.input_meshes == (["m0", "m1"], "m0")
    specs = lowered.function_named_shardings.input_specs
    assert jax.tree.map(lambda struct: struct.sharding, lowered.args_info) == specs
    args = weights(BLOCKS), batches(1)[0]
    tree_allclose(compiled(*jax.device_put(args, specs)), jax.jit(model)(*args))


def test_both_names_of_each_type(lowered, compiled):
    assert isinstance(lowered, mpmd.Lowered)
    assert isinstance(compiled, mpmd.Compiled)
    with pytest.raises(AttributeError, match="has no Executable: what `compile` returns runs by itself"):
        _ = mpmd.Executable
    assert mpmd.Config is mpmd.MpmdConfig
    assert mpmd.FunctionMeshAssignment is mpmd.FunctionIOMeshAssignment


def test_costs_and_memory_of_each_mesh(compiled):
    costs, memory = compiled.cost_analysis(), compiled.memory_analysis()
    assert list(costs) == list(memory) == ["m0", "m1"]
    # One block on each mesh: a product of 4 x 8 with 8 x 8, replicated, and some elementwise work.
    assert all(cost["flops"] >= 2 * 4 * WIDTH * WIDTH for cost in costs.values())
    assert costs["m0"]["flops"] > costs["m1"]["flops"]  # the unnamed product with 2
    assert [memory[mesh].argument_bytes for mesh in memory] == [4 * WIDTH * (WIDTH + 4), 4 * WIDTH * WIDTH]
    held = [of.argument_bytes + of.peak_bytes + of.temp_bytes for of in memory.values()]
    assert compiled.peak_memory_bytes == max(held)


def test_compiler_options(lowered, compiled):
    args = weights(BLOCKS), batches(1)[0]
    for options in ({"xla_embed_ir_in_executable": True}, {"m1": {"xla_embed_ir_in_executable": True}}):
        tree_allclose(lowered.compile(options)(*args), compiled(*args))
    with pytest.raises(Exception, match="xla_no_such_option"):  # they reach XLA, by mesh too
        lowered.compile({"m1": {"xla_no_such_option": True}})
    with pytest.raises(ValueError, match="compiler_options are given for the mesh 'm9', which the topology lacks"):
        lowered.compile({"m9": {}})
    with pytest.raises(TypeError, match=r"options of meshes \(m0\) beside single options \(xla_x\)"):
        lowered.compile({"m0": {}, "xla_x": True})


def test_arrays_on_another_mesh_are_refused(meshes, lowered, compiled):
    ws, x = weights(BLOCKS), batches(1)[0]
    wrong = jax.device_put(ws, NamedSharding(meshes["m0"], P()))
    message = r"argument\[0\]\[1\] of model is on mesh 'm0', but the program reads it on mesh 'm1'. Place .*input_spec"
    with pytest.raises(ValueError, match=message):
        compiled(wrong, x)
    with pytest.raises(ValueError, match=message):
        mpmd.jit(model, config(meshes, in_runs(BLOCKS, 2)))(wrong, x)
    with pytest.raises(ValueError, match=r"argument\[1\] of model is on devices \[7\], but .* on mesh 'm0'"):
        compiled(ws, jax.device_put(x, jax.devices()[7]))
    # On its mesh an array may be partitioned in any way; host arrays and arrays that JAX may move are copied.
    halves = jax.device_put(x, NamedSharding(meshes["m0"], P("data")))
    tree_allclose(compiled([np.asarray(ws[0]), ws[1]], halves), jax.jit(model)(ws, x))


def test_arguments_over_a_mesh_that_the_topology_lacks(meshes):
    elsewhere = Mesh(np.array(jax.devices()[:2]), ("other",))
    x = jax.ShapeDtypeStruct((4, WIDTH), jnp.float32, sharding=NamedSharding(elsewhere, P("other")))
    with pytest.raises(ValueError, match=r"lowering_args\[1\] is over a mesh with axes {'other': 2}, but no mesh"):
        mpmd.jit(model, config(meshes, in_runs(BLOCKS, 2))).lower(weights(BLOCKS), x)


def test_arguments_that_are_not_read_stay_where_they_are(meshes):
    def reads_one(x, unused):
        return mpmd.named_computation(jnp.sin, name="sin")(x)

    cfg = config(meshes, {"sin": "m1"}, input_mesh_assignment=(None, "m0"))
    x, elsewhere = jnp.ones(3), jax.device_put(jnp.ones(5), jax.devices()[7])
    dropped, kept = (mpmd.jit(reads_one, cfg, keep_unused=keep).lower(x, elsewhere) for keep in (False, True))
    assert dropped.function_mesh_assignment == kept.function_mesh_assignment
    assert dropped.function_mesh_assignment.input_meshes == ("m1", "m0")
    tree_allclose(dropped.compile()(x, elsewhere), jnp.sin(x))
    with pytest.raises(ValueError, match=r"argument\[1\] of reads_one is on devices \[7\].* on mesh 'm0'"):
        kept.compile()(x, elsewhere)
    memory = [lowered.compile().memory_analysis()["m0"].argument_bytes for lowered in (dropped, kept)]
    assert memory == [0, 5 * 4]
    mpmd.jit(reads_one, cfg, donate_argnums=1)(x, elsewhere)
    assert elsewhere.is_deleted()


def test_results_made_from_several_meshes(meshes):
    """They go where few bytes are transferred, or where the user wants them."""

    def fun(x):
        y = mpmd.named_computation(lambda x: x + 1, name="one")(x)
        z = mpmd.named_computation(lambda y: jnp.sin(y), name="two")(y)
        return y + (z - 3)

    x = jnp.arange(8.0)
    for asked, mesh in ("m0", "m0"), ((), "m1"):
        cfg = mpmd.make_config(meshes, {"one": "m0", "two": "m1"}, output_mesh_assignment=asked)
        lowered = mpmd.jit(fun, cfg).lower(x)
        assert lowered.function_mesh_assignment.output_meshes == mesh
        assert lowered.as_text().count(" send ") == (2 if asked else 1)
        tree_allclose(lowered.compile()(x), jax.jit(fun)(x))


def test_a_result_that_reads_no_argument_is_made_as_it_is_asked_for(meshes):
    """First values of a model: no device makes the whole array, and no second program partitions it."""
    function = mpmd.jit(lambda: jnp.ones((8, 4)), config(meshes, {}), out_shardings=P("data"))
    compiled = function.lower().compile()
    made = compiled()
    assert made.sharding.spec == P("data")
    assert compiled.as_text().count(" = inferred(") == 1
    np.testing.assert_array_equal(made, np.ones((8, 4)))


def test_host_memory_in_the_names_of_meshes(meshes):
    def fun(w, x):
        y = mpmd.named_computation(jnp.dot, name="dot")(x, jax.device_put(w, jax.memory.Space.Device))
        return y, {"kept": w, "sum": y.sum()}

    assignment = {
        "input_mesh_assignment": ("m1#pinned_host", "m1#device"),
        "output_mesh_assignment": ("m0#pinned_host", {"kept": "m1#pinned_host", "sum": None}),
    }
    lowered = mpmd.jit(fun, config(meshes, {"dot": "m1#device"}, **assignment)).lower(jnp.eye(8), jnp.ones((4, 8)))
    assert lowered.function_mesh_assignment.input_meshes == ("m1", "m1")
    assert lowered.function_mesh_assignment.output_meshes == ("m0", {"kept": "m1", "sum": "m1"})
    assert lowered.function_named_shardings.input_specs[0].memory_kind == "pinned_host"
    y, rest = lowered.compile()(*jax.device_put((jnp.eye(8), jnp.ones((4, 8))), lowered.input_shardings))
    assert [a.sharding.memory_kind for a in (y, rest["kept"], rest["sum"])] == ["pinned_host", "pinned_host", "device"]
    assert y.sharding.mesh == meshes["m0"]
    tree_allclose((y, rest["sum"]), (jnp.ones((4, 8)), jnp.float32(32)))

    with pytest.raises(NotImplementedError, match=r"'dot' is assigned to 'm1#pinned_host'. .*Space.Host"):
        config(meshes, {"dot": "m1#pinned_host"})
    device = NamedSharding(meshes["m1"], P(), memory_kind="device")
    cfg = config(meshes, {"dot": "m1"}, **assignment)
    with pytest.raises(ValueError, match=r"assigns 'm1#pinned_host', but the sharding names the memory 'device'"):
        mpmd.jit(fun, cfg, in_shardings=(device, None)).lower(jnp.eye(8), jnp.ones((4, 8)))


def test_fragments_are_listed_in_program_order(meshes):
    """Microbatch by microbatch, as far as each mesh's own order allows; work without a name stands in place."""
    ws, xs = weights(BLOCKS), batches(3)
    lowered = mpmd.jit(train_step, config(meshes, in_runs(BLOCKS, 2), "GPIPE")).lower(ws, xs)
    runs = re.findall(r"= (\w+)\(", lowered.as_text("mpmd"))
    named = [name for name in runs if name != "inferred"]
    assert named == [f"{kind}__{m}" for m in range(3) for kind in ("fwd_0", "fwd_1")] + [
        f"{kind}__{m}" for m in range(3) for kind in ("bwd_1", "bwd_0")
    ]
    assert runs[-2:] == ["inferred", "inferred"]  # the update of the weights


@pytest.mark.parametrize("dialect", ["ifrt", "stablehlo", "text"])
def test_other_dialects(lowered, dialect):
    with pytest.raises(ValueError, match=f"no dialect '{dialect}'; use 'mpmd'. .* no MLIR module of the"):
        lowered.as_text(dialect)
