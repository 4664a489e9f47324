"""The texts of JAX that decide something: each test makes JAX write the real one, and fails if JAX words it anew."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore
from jax.experimental import transfer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jaxpp_flax import _compat
from jaxpp_flax._compat_processes import coordination
from jaxpp_flax._compat_texts import errors, traces
from jaxpp_flax._compat_texts.errors import MeshFault
from jaxpp_flax.engine.jit import mpmd_jit_with_loop
from jaxpp_flax.engine.tracing.ir import bodies, opened, without_high_calls
from jaxpp_flax.engine.tracing.markers import mark_stage_end
from jaxpp_flax.engine.tracing.treduce import treduce
from jaxpp_flax.mpmd.ops import name_scope, names_in
from jaxpp_flax.schedules import GPipe, Schedule, Std1F1B, ZeroBubble
from tests.engine.toys import mesh_of
from tests.helpers import tree_allclose

# Scopes.


def equations(function: Callable[..., Any], *operands: Any) -> Iterator[tuple[str, str]]:
    """The primitives of a function's trace with their scopes, also those inside of calls, under the calls' scopes."""

    def walk(jaxpr: Any, outer: str) -> Iterator[tuple[str, str]]:
        for equation in jaxpr.eqns:
            scopes = f"{outer}/{traces.scopes_of(equation.source_info)}"
            yield equation.primitive.name, scopes
            for body in bodies(equation.params):
                yield from walk(body, scopes)

    return walk(opened(without_high_calls(jax.make_jaxpr(function)(*operands))), "")


@jax.custom_vjp
def sine(x: jax.Array) -> jax.Array:
    return jnp.sin(x)


sine.defvjp(lambda x: (jnp.sin(x), x), lambda x, cotangent: (cotangent * jnp.tan(x),))


@pytest.mark.parametrize("layer", [jnp.sin, sine, jax.jit(jnp.sin)], ids=["plain", "custom_vjp", "jit"])
def test_work_of_a_backward_pass_is_a_transposition(layer: Callable[..., Any]):
    """Forward work is none. The equations inside a call have the scopes of the call around them."""
    top = jax.make_jaxpr(jax.grad(lambda x: jnp.exp(layer(x))))(1.0).eqns
    counts = [traces.transpositions(traces.scopes_of(equation.source_info)) for equation in top]
    assert counts == sorted(counts), "the backward follows the forward"
    assert set(counts) == {0, 1}
    assert counts[-1] == 1


def test_a_transposition_is_counted_at_each_turn():
    double = lambda x: jnp.multiply(x, 2.0)  # noqa: E731
    back = lambda x: jax.linear_transpose(double, 1.0)(x)[0]  # noqa: E731
    again = lambda x: jax.linear_transpose(back, 1.0)(x)[0]  # noqa: E731
    found = [next(equations(function, 1.0))[1] for function in (double, back, again)]
    assert list(map(traces.transpositions, found)) == [0, 1, 2]


def test_names_of_computations_stand_in_the_scopes_as_they_were_written():
    def named(x: jax.Array) -> jax.Array:
        with name_scope("computation", "layer/1 (last)", 2):
            return jnp.sin(x)

    ((_, scopes),) = equations(named, 1.0)
    assert names_in(scopes, "computation") == [("layer/1 (last)", 0, 2)]


def test_what_is_computed_again_is_told_from_the_forward_and_the_backward():
    """In both implementations of `jax.checkpoint`: run this with JAX_REMAT3=1, too."""
    found = [*equations(jax.grad(lambda x: jnp.sin(jax.checkpoint(lambda x: jnp.exp(jnp.tanh(x)))(x))), 1.0)]
    again = [(name, traces.is_recomputed(scopes)) for name, scopes in found if name in ("tanh", "cos")]
    assert sorted(again) == [("cos", False), ("tanh", False), ("tanh", True)]


def step(weights: list[jax.Array], batch: jax.Array, schedule: Schedule | None) -> Any:
    def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for k, weight in enumerate(weights):
            layer = jax.checkpoint(lambda weight, x: jnp.sin(jnp.tanh(x @ weight)))
            x = layer(weight, mark_stage_end(x) if k else x)
        return jnp.mean(x**2) + 0.1 * jnp.sum(weights[0] ** 2)

    return treduce(lambda x: jax.value_and_grad(loss)(weights, x), batch, schedule)


@pytest.mark.parametrize("schedule", [Std1F1B(2), GPipe(2), ZeroBubble(2)], ids=str)
@pytest.mark.parametrize("text", ["_TRANSPOSED", "_RECOMPUTED"])
def test_a_step_is_right_where_jax_words_its_scopes_anew(
    monkeypatch: pytest.MonkeyPatch, text: str, schedule: Schedule
):
    monkeypatch.setattr(traces, text, "worded anew")
    random = np.random.default_rng(0)
    weights = [jnp.asarray(random.normal(size=(8, 8)) / 3, jnp.float32) for _ in range(2)]
    batch = random.normal(size=(3, 4, 8)).astype(np.float32)
    actual = mpmd_jit_with_loop(step, mesh_of(2), static_argnums=2)(weights, batch, schedule)
    # The sums of three microbatches, in another order.
    tree_allclose(actual, jax.jit(step, static_argnums=2)(weights, batch, None), rtol=1e-5)


# The context of an equation.


def meshes() -> tuple[AbstractMesh, AbstractMesh]:
    whole, part = (
        Mesh(np.array(jax.devices()[:count]), ("data",), axis_types=(AxisType.Explicit,)).abstract_mesh
        for count in (4, 2)
    )
    return whole, part


def test_an_equations_context_moves_to_another_mesh():
    whole, part = meshes()
    with jax.sharding.use_abstract_mesh(whole):
        (equation,) = jax.make_jaxpr(jnp.sin)(jax.ShapeDtypeStruct((4,), jnp.float32)).eqns
    assert equation.ctx.cur_abstract_mesh == whole
    moved = traces.context_on_mesh(equation.ctx, part)
    assert type(moved) is type(equation.ctx)
    assert moved.cur_abstract_mesh == part
    assert equation.ctx.cur_abstract_mesh == whole


class Context:
    """An equation's context that cannot be copied by its slots: it has none."""

    def __init__(self) -> None:
        self.mesh = jax.sharding.get_abstract_mesh()


def test_a_context_without_slots_is_made_anew_on_the_mesh():
    whole, part = meshes()
    with jax.sharding.use_abstract_mesh(whole):
        context = Context()
        assert traces.context_on_mesh(context, part).mesh == part
    assert context.mesh == whole


def test_an_equation_is_bound_again_under_its_mesh():
    whole, part = meshes()
    with jax.sharding.use_abstract_mesh(whole):
        (equation,) = jax.make_jaxpr(jnp.sin)(jax.ShapeDtypeStruct((4,), jnp.float32)).eqns
    with traces.in_context(equation.ctx):
        assert jax.sharding.get_abstract_mesh() == whole
    with jax.sharding.use_abstract_mesh(part):
        for nothing_known in (None, object()):
            with traces.in_context(nothing_known):
                assert jax.sharding.get_abstract_mesh() == part


# Errors.


def raised(function: Callable[..., Any], *arguments: Any) -> Any:
    with pytest.raises(Exception, match=r".") as found:  # which error it is, the test asks
        function(*arguments)
    return found.value


def small(kind: AxisType = AxisType.Auto, ranks: int = 1) -> Mesh:
    devices = np.array(jax.devices()[: 2 * ranks]).reshape(ranks, 2)
    return Mesh(devices, ("stage", "data"), axis_types=(kind,) * 2)


def refused_under(mesh: Mesh, function: Callable[..., Any]) -> ValueError:
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return raised(jax.jit(function).trace, jax.ShapeDtypeStruct((4, 4), jnp.float32))


def mapped_over(mesh: Mesh) -> Callable[..., Any]:
    return lambda x: jax.shard_map(jnp.sin, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(x)


AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
FAULTS: list[tuple[AxisType, Callable[..., Any], MeshFault]] = [
    (AUTO, lambda x: jax.lax.with_sharding_constraint(x, P("model")), MeshFault.UNKNOWN_AXIS),
    (AUTO, lambda x: jax.sharding.reshard(x, P("data")), MeshFault.EXPLICIT_ONLY),
    (AUTO, lambda x: jnp.einsum("ab,bc->ac", x, x, out_sharding=P("data")), MeshFault.EXPLICIT_ONLY),
    (AUTO, lambda x: mapped_over(small(AUTO, 2))(x), MeshFault.ANOTHER_MESH),
    (
        EXPLICIT,
        lambda x: jax.sharding.reshard(x, NamedSharding(small(EXPLICIT, 2), P("data"))) @ x,
        MeshFault.ANOTHER_MESH,
    ),
]


@pytest.mark.parametrize(("kind", "function", "fault"), FAULTS)
def test_faults_of_a_trace_under_a_mesh(kind: AxisType, function: Callable[..., Any], fault: MeshFault):
    error = refused_under(small(kind), function)
    assert isinstance(error, ValueError)
    assert errors.mesh_fault(error) is fault
    assert errors.names_mesh(error) or fault is MeshFault.EXPLICIT_ONLY
    assert errors.names_axes(error, {"stage": 2, "data": 2}) == (fault is MeshFault.ANOTHER_MESH)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jax.lax.with_sharding_constraint(x, P("data")),
        lambda x: jax.sharding.reshard(x, P("data")),
        lambda x: jax.shard_map(jnp.sin, in_specs=P("data"), out_specs=P("data"))(x),
    ],
)
def test_axes_without_a_mesh(function: Callable[..., Any]):
    error = raised(jax.jit(function), jnp.ones((4, 4)))
    assert isinstance(error, (RuntimeError, ValueError))
    assert errors.names_mesh(error)


def test_an_axis_name_that_nothing_binds():
    for collective in (jax.lax.psum, jax.lax.pmean, jax.lax.all_gather):
        error = raised(jax.make_jaxpr(lambda x, of=collective: of(x, "batch")), jnp.ones(4))
        assert isinstance(error, NameError)
        assert errors.unbound_axis(error) == "batch"
    assert errors.unbound_axis(raised(lambda: missing)) is None  # type: ignore[name-defined]  # noqa: F821


def test_shards_that_would_differ_in_size():
    x, sharding = np.ones((3, 4)), NamedSharding(small(), P("data"))
    under = lambda x: jax.sharding.reshard(x, P("data"))  # noqa: E731
    with jax.set_mesh(small(EXPLICIT)):
        typed = raised(jax.jit(under), x)
    refusals = [
        raised(jax.device_put, x, sharding),
        raised(jax.jit(jnp.sin, in_shardings=sharding), x),
        raised(jax.jit(mapped_over(small())), x),
        typed,
    ]
    for error in refusals:
        assert isinstance(error, ValueError)
        assert errors.is_uneven_split(error)


def test_a_product_that_cpu_lacks():
    query = jnp.ones((1, 4, 2, 8), jnp.float16)
    error = raised(jax.jit(lambda q: jax.nn.dot_product_attention(q, q, q)), query)
    assert isinstance(error, ValueError)
    assert errors.lacks_product(error)


def test_a_platform_that_is_not_attached():
    error = raised(jax.devices, "rocm")
    assert isinstance(error, RuntimeError)
    assert errors.lacks_backend(error)


def test_a_wait_for_the_coordination_service_that_ends_without_an_answer():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    stop = coordination.start_coordination_service(address, 1)
    assert stop is not None
    client = _compat._runtime.get_distributed_runtime_client(address, 0, init_timeout=10)
    client.connect()
    error = raised(client.blocking_key_value_get_bytes, "nothing", 1)
    client.shutdown()
    stop()
    assert errors.has_timed_out(error)
    assert errors.is_of_jax(error)
    assert not errors.is_of_jax(ValueError("my own"))


def test_what_awaited_a_connection_that_is_given_up():
    client = jax.local_devices()[0].client
    mine, other = (transfer.start_transfer_server(client, "127.0.0.1:0", ["127.0.0.1:0"]) for _ in range(2))
    connection = mine.connect(other.address())
    place = SingleDeviceSharding(jax.devices()[0])
    (array,) = connection.pull(7, [jax.ShapeDtypeStruct((4,), np.float32, sharding=place)])
    assert _compat.poison(connection)
    error = raised(np.asarray, array)
    assert errors.is_of_jax(error)
    assert errors.may_come_from_a_peer(error)
    assert errors.is_of_jax(RuntimeError(f"step 3 failed: {type(error).__name__}: {error}"))


def error_of_tensorstore(kvstore: dict[str, Any]) -> ValueError:
    with pytest.raises(ValueError, match="zarr") as caught:
        tensorstore.open({"driver": "zarr", "kvstore": kvstore}, open=True).result()  # type: ignore[attr-defined]
    return caught.value


def test_a_storage_that_does_not_answer_is_not_one_that_lacks_something(tmp_path: Path):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # without `listen`, connections are refused
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        context = {"http_request_retries": {"max_retries": 1}}
        assert errors.is_of_storage(error_of_tensorstore({"driver": "http", "base_url": url, "context": context}))
    assert not errors.is_of_storage(error_of_tensorstore({"driver": "file", "path": f"{tmp_path}/"}))
