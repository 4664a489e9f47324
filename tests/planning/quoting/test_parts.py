"""The parts of a quote: the table of devices, curves, facts of a task, and steps predicted from shorter ones."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpp_flax.engine.tracing.inline import inline
from jaxpp_flax.engine.tracing.ir import from_jaxpr
from jaxpp_flax.planning import Curves, Hardware, MeasuredCurves, StageLoad, StepModel, device_named
from jaxpp_flax.planning.quoting.curves import Group
from jaxpp_flax.planning.quoting.facts import AxisCollective, Product, TaskFacts, facts_of_task
from jaxpp_flax.planning.quoting.long_steps import prediction_of
from jaxpp_flax.schedules import by_name
from jaxpp_flax.schedules.residuals import KEEP, ResidualPlan, StageResiduals

NAMES = ("a100-40", "a100-80", "h100-sxm", "h200", "b200", "mi300x", "tpu-v5e", "tpu-v5p", "tpu-v6e")


def test_every_device_has_a_source():
    for name in NAMES:
        device = device_named(name)
        assert device.peak_of("bfloat16") > device.peak_of("float32") >= device.peak_of("float64")
        assert device.inside > device.across
        assert device.source


def test_a_table_of_the_users(tmp_path):
    table = tmp_path / "devices.toml"
    row = "peak = {{ bfloat16 = 1e12 }}\nmemory = {memory}\nmemory_bandwidth = 1e9\ninside = 1e9\nacross = 1e8\n"
    rest = 'per_node = 4\nhost_bandwidth = 1e9\nsource = "measured"\nprice = 1.5\n'
    table.write_text("[mine]\n" + row.format(memory="8e9") + rest)
    assert device_named("mine", table).price == 1.5
    assert device_named("h200", table) == device_named("h200")
    for text, message in (
        ("[mine]\n" + row.format(memory="8e9"), "'mine' has no field 'per_node'"),
        ("[mine]\n" + row.format(memory="-1") + rest, "memory = -1; it must be a number above 0"),
        ("[mine]\nmemry = 1\n", "the unknown field 'memry'. Did you mean 'memory'"),
        ("mine = 3", "it must be a table"),
        ("[mine", "is no TOML"),
    ):
        table.write_text(text)
        with pytest.raises(ValueError, match=message):
            device_named("mine", table)


def test_products_and_collectives():
    device, curves = device_named("h100-sxm"), Curves(product=0.5, edge=64.0, memory=1.0, kernel=0.0, hop=1e-6)
    work = lambda n: TaskFacts((Product(1.0, n, n, n, "bfloat16", 2),))  # noqa: E731
    reached = [2 * n**3 / curves.compute(work(n), device) / device.peak["bfloat16"] for n in (256, 1024, 8192, 1e6)]
    assert reached == sorted(reached)
    assert reached[-1] == pytest.approx(0.5, rel=1e-3)
    thin = Product(1.0, 1, 8192, 8192, "bfloat16", 2)  # its bytes take longer
    assert curves.compute(TaskFacts((thin,)), device) >= thin.nbytes / device.memory_bandwidth
    inside, across = Group(8, 8), Group(16, 8)
    assert curves.all_reduce(1e9, inside, device) == 2 * curves.gather(1e9, inside, device)
    assert curves.gather(1e9, across, device) > curves.gather(1e9, inside, device)
    assert curves.gather(1e9, Group(16, 1), device) > curves.gather(1e9, across, device)
    assert curves.gather(1e9, Group(1, 1), device) == 0


def test_measured_curves_take_the_time_of_the_device_at_hand():
    device, work = device_named("h100-sxm"), TaskFacts((Product(4.0, 512, 512, 512, "float32", 4),), moved=4e6)
    layer = jax.jit(lambda x, w: jnp.tanh(jax.lax.fori_loop(0, 4, lambda _, y: y @ w, x)))
    values = jnp.ones((512, 512))
    taken = []
    for _ in range(6):
        start = time.perf_counter()
        layer(values, values).block_until_ready()
        taken.append(time.perf_counter() - start)
    measured = MeasuredCurves()
    assert min(taken) / 10 < measured.compute(work, device) < min(taken) * 10
    assert measured.compute(work, device) > 10 * Curves().compute(work, device)
    assert measured.gather(1e9, Group(8, 8), device) == Curves().gather(1e9, Group(8, 8), device)


def test_the_facts_of_a_block_that_devices_share():
    def block(x, up, down):
        return jnp.tanh(x @ up) @ down

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 16), (16, 64), (64, 16))]
    graph = inline(from_jaxpr(jax.make_jaxpr(block)(*shapes))[0], flatten=True)
    specs = (P(), P(None, "tensor"), P("tensor", None))
    alone, _ = facts_of_task(graph, specs, {"tensor": 1})
    shared, _ = facts_of_task(graph, specs, {"tensor": 4})
    assert [(p.m, p.n, p.k) for p in alone.products] == [(8, 64, 16), (8, 16, 64)]
    assert [(p.m, p.n, p.k) for p in shared.products] == [(8, 16, 16), (8, 16, 16)]
    assert alone.collectives == ()
    assert shared.collectives == (AxisCollective("tensor", 8 * 16 * 4),)
    assert alone.moved == 2 * 8 * 64 * 4  # tanh reads the first product, and writes for the second
    assert shared.moved == alone.moved / 4

    summed = inline(from_jaxpr(jax.make_jaxpr(lambda a, b, w, v: a @ w + b @ v)(*shapes[:1] * 2, *[
        jax.ShapeDtypeStruct((16, 16), jnp.float32)] * 2))[0], flatten=True)  # fmt: skip
    facts, _ = facts_of_task(summed, (P(), P(), P("tensor"), P("tensor")), {"tensor": 2})
    assert facts.collectives == (AxisCollective("tensor", 8 * 16 * 4),)  # XLA adds the two first

    def update(x, g):  # as of the second of two weights, where tokens are cut between products
        return jnp.einsum("si,so->io", x, g)

    graph = from_jaxpr(jax.make_jaxpr(update)(shapes[0], jax.ShapeDtypeStruct((8, 64), jnp.float32)))[0]
    facts, _ = facts_of_task(graph, (P("tensor"), P(None, "tensor")), {"tensor": 4})
    (product,) = facts.products
    assert (product.m, product.n, product.k) == (16, 16, 8)  # an axis cuts one dimension
    assert facts.collectives == (AxisCollective("tensor", 8 * 16 * 4, "gather"),)

    looped = from_jaxpr(jax.make_jaxpr(lambda x, w: jax.lax.scan(lambda c, _: (c @ w, None), x, None, 5)[0])(
        jax.ShapeDtypeStruct((4, 8), jnp.float32), jax.ShapeDtypeStruct((8, 8), jnp.float32)))[0]  # fmt: skip
    assert facts_of_task(looped, (P(), P()), {})[0].products[0].times == 5
    assert facts_of_task(looped, (P("data"), P()), {"data": 4})[0].products[0].times == 5 / 4


def test_experts_exchange_tokens():
    mesh = AbstractMesh((4, 2), ("expert", "tensor"), axis_types=(AxisType.Auto,) * 2)

    def dispatched(tokens, widen, narrow):  # (examples, experts, capacity, width)
        place = lambda x, *cut: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*cut)))  # noqa: E731
        sent = place(place(tokens, "expert"), None, "expert")
        made = jnp.einsum("becf,efd->becd", jnp.einsum("becd,edf->becf", sent, widen), narrow)
        return place(place(made, None, "expert"), "expert")

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 16, 3, 32), (16, 32, 64), (16, 64, 32))]
    graph = inline(from_jaxpr(jax.make_jaxpr(dispatched)(*shapes))[0], flatten=True)
    specs = P("expert"), P("expert", None, "tensor"), P("expert", "tensor")
    facts, (result,) = facts_of_task(graph, specs, mesh.shape)
    part = 8 * 16 * 3 * 32 * 4 / 4
    exchange, total = AxisCollective("expert", part, "exchange"), AxisCollective("tensor", part)
    assert sorted(facts.collectives) == sorted((exchange, exchange, total))
    assert [(p.times, p.m, p.n, p.k) for p in facts.products] == [(4, 32, 8 * 3, 32)] * 2
    assert result == P("expert")


@pytest.mark.parametrize("residuals", [KEEP, StageResiduals(recompute=True)])
@pytest.mark.parametrize(
    ("name", "stages"),
    [("1f1b", 4), ("zero_bubble", 4), ("interleaved_1f1b", 8), ("zbv", 8), ("dualpipe_v", 8)],
)
def test_a_long_step_is_predicted_from_two_shorter_ones(name: str, stages: int, residuals: StageResiduals):
    loads = [
        StageLoad(forward=1.0 + i % 3 / 4, backward=2.0 + i % 2, residual_bytes=8.0, input_bytes=1.0, sent_bytes=1.0)
        for i in range(stages)
    ]
    hardware = Hardware(flops=1.0, host_bandwidth=1.0, link_bandwidth=10.0)
    step = StepModel(schedule=by_name(name, stages, 4), num_microbatches=48, stages=loads, hardware=hardware)
    plan = ResidualPlan([residuals] * stages)
    short, whole = prediction_of(step, plan), step.predict(plan)
    assert short.seconds == pytest.approx(whole.seconds, rel=1e-9)
    assert short.peak_bytes == pytest.approx(whole.peak_bytes)
