"""A quote ranks layouts of devices that are not there, says why, and its plan trains."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.planning import AssignmentError, Curves, Plan, Quote, Quoter, device_named, quote
from jaxpp_flax.planning.__main__ import main
from jaxpp_flax.planning.quoting.layouts import Layout, layouts
from jaxpp_flax.planning.quoting.search import rank
from jaxpp_flax.planning.quoting.traced import Axes, trace_model
from jaxpp_flax.schedules import ScheduleError
from jaxpp_flax.schedules.residuals import KEEP, StageResiduals
from jaxpp_flax.trainers import MeshError, MeshOptions, PrecisionWarning
from tests.planning.quoting.models import make


@pytest.fixture(scope="module")
def quoter() -> Quoter:
    return Quoter(trace_model(make), device_named("a100-80"), Curves())


def loss_by_parts(model: Any, batch: jax.Array) -> jax.Array:
    x = model.first(batch)
    for block in model.blocks:
        x = block(x)
    return jnp.mean(x**2)


def test_every_size_is_traced_but_the_model_is_warned_of_once(recwarn: pytest.WarningsRecorder):
    trace_model(lambda **options: make(2, loss_fn=loss_by_parts, precision="bfloat16", **options))
    [text] = [str(warning.message) for warning in recwarn if warning.category is PrecisionWarning]
    # `first` is called by the loss, so its input is not converted.
    assert "A part of the model that the loss calls by itself takes its inputs as they are" in text, text


def make_four(layers: int = 4, **options: Any) -> tuple[PipelineTrainer, Any]:
    """A model that compiles in less time."""
    return make(layers, **options)


def test_one_block_stands_for_all_that_equal_it(quoter: Quoter):
    whole, short = quoter.model, trace_model(make, "layers")
    assert short.names == whole.names
    assert len(short.traces[0].names) == 4
    for axes in (Axes(), Axes(tensor=4, fsdp=2)):
        assert short.work(8, axes) == whole.work(8, axes)
        key = lambda item: (item.kind, item.blocks, item.nbytes)  # noqa: E731
        assert sorted(map(key, short.holdings(8, axes))) == sorted(map(key, whole.holdings(8, axes)))
    assert (short.sent(8), short.passing(8), short.flops) == (whole.sent(8), whole.passing(8), whole.flops)


def test_two_sizes_of_a_microbatch_give_all_others(quoter: Quoter):
    one, two = quoter.model.traces
    assert (one.microbatch, two.microbatch) == (2, 3)
    other = trace_model(lambda **options: make(batch=25, **options))  # its microbatches have 5 and 25 examples
    for pair, found in zip(quoter.model.work(25, Axes(2)), other.work(25, Axes(2)), strict=True):
        for facts, wanted in zip(pair, found, strict=True):
            assert facts.products == wanted.products
            assert facts.collectives == wanted.collectives
            assert (facts.moved, facts.saved) == pytest.approx((wanted.moved, wanted.saved))
    kept = {(i.kind, i.blocks): i.nbytes for i in other.holdings(25, Axes(tensor=2)) if i.kind != "data"}
    assert {
        (i.kind, i.blocks): i.nbytes for i in quoter.model.holdings(25, Axes(tensor=2)) if i.kind != "data"
    } == pytest.approx(kept)


def test_axes_cut_what_is_annotated(quoter: Quoter):
    def total(kind: str, axes: Axes) -> float:
        return sum(item.nbytes for item in quoter.model.holdings(6, axes) if item.kind == kind)

    whole, first = 4.0 * (16 * 16 + 16 + 7 * 2 * 16 * 64), 4.0 * (16 * 16 + 16)
    for kind, of in (("parameters", 1), ("gradients", 1), ("optimizer", 2)):
        assert total(kind, Axes()) == pytest.approx(of * whole, abs=8)  # and the loss
        for axes, parts in ((Axes(tensor=4), 4), (Axes(fsdp=8), 8), (Axes(tensor=2, fsdp=4), 8)):
            assert total(kind, axes) == pytest.approx(of * (first + (whole - first) / parts), abs=8)
    assert total("gathered", Axes(tensor=2, fsdp=4)) == (whole - first) / 2
    assert quoter.model.divides("tensor", 64)
    assert not quoter.model.divides("tensor", 3)
    assert not quoter.model.divides("expert", 2)


def test_no_step_falls_below_its_bound(quoter: Quoter):
    for layout in list(layouts(quoter.model, 12))[::21]:
        step = quoter.quoted(layout)
        assert quoter.quick(layout) <= step.seconds * (1 + 1e-9), layout
        assert quoter.mean(layout) <= quoter.least(layout) <= step.memory * (1 + 1e-9), layout
        assert quoter.least(layout) > 0.65 * step.memory, layout  # so that what does not fit is not simulated
        assert sum(step.parts.values()) == pytest.approx(step.seconds)
        assert max(step.peaks) == pytest.approx(step.memory)


def test_what_is_offloaded_leaves_the_devices(quoter: Quoter):
    layout = Layout(pipeline=4, data=1, microbatch=3, stages=4)
    moved = quoter.quoted(replace(layout, residuals=StageResiduals(offload=1.0)))
    assert moved.peaks[0] < quoter.quoted(layout).peaks[0]  # where most microbatches are in flight
    assert moved.host_bytes > 0


def test_the_search_finds_what_all_layouts_have(quoter: Quoter):
    every = [quoter.quoted(layout) for layout in layouts(quoter.model, 4)]
    limit = sorted(step.memory for step in every)[len(every) // 3]
    found = rank(quoter, 4, limit, 3)
    best = min((step for step in every if step.memory <= limit), key=lambda step: step.seconds)
    assert found.steps[0].seconds == best.seconds
    assert found.simulated < found.tried == len(every)


def test_what_does_not_fit_is_closest_by_its_bytes(quoter: Quoter):
    for wanted in ({"fsdp": 1, "microbatch": 2}, {"pipeline": 1}):
        least = min(quoter.quoted(layout).memory for layout in layouts(quoter.model, 4, wanted))
        found = rank(quoter, 4, 1.0, 3, wanted)
        assert not found.steps
        assert found.closest is not None
        assert found.closest.memory == least


def test_the_first_few_are_named(quoter: Quoter):
    found = Quote(quoter=quoter, ranking=rank(quoter, 8, 1e12, 10), device=quoter.device)
    three = found.best_of(3)
    assert three == found.ranking.steps[:3]
    assert three[0] == found.best
    meshes = {tuple(step.layout.axes.values()) for step in three}
    assert len(meshes) == 3
    assert found.best_of(1000) == found.ranking.steps
    assert all(found.plan(step).seconds == step.seconds for step in three)
    assert "Measure the first three, `found.best_of(3)` or `--explain SIZES --save FILE` for each" in str(found)
    with pytest.raises(ValueError, match="count=0: it must be a whole number of at least 1"):
        found.best_of(0)


@pytest.mark.parametrize("ranks", [4, 64])
def test_an_explanation_is_short(ranks: int):
    quoter = Quoter(trace_model(lambda layers=130, **options: make(layers, **options), "layers"),
                    device_named("h100-sxm"), Curves())  # fmt: skip
    step = quoter.quoted(Layout(pipeline=ranks, microbatch=2, stages=ranks))
    found = Quote(quoter=quoter, ranking=rank(quoter, 1, 1e12, 1), device=quoter.device)
    lines = found.explain(step).splitlines()
    assert len(lines) <= 200
    assert any(line.startswith(f"rank {ranks - 1:>2}".replace("  ", " ")) for line in lines), "the last rank"
    assert ("... ranks 8 to 55" in lines) == (ranks == 64)


@pytest.mark.parametrize("axis", ["data", "fsdp"])
def test_the_bytes_are_those_of_the_planned_program(axis: str):
    factory = lambda **options: make(2, **options)  # noqa: E731
    quoter = Quoter(trace_model(factory), device_named("a100-80"), Curves())
    wanted = {"pipeline": 2, axis: 2, "microbatch": 3}
    tried = [of for of in layouts(quoter.model, 4, wanted) if of.schedule == "1f1b" and of.tensor == 1]
    tried = [of for of in tried if (of.residuals.recompute if axis == "data" else of.residuals == KEEP)]
    assert {of.gather for of in tried} == ({"microbatch"} if axis == "data" else {"microbatch", "step"})
    for layout in tried:
        plan = Quote(quoter=quoter, ranking=rank(quoter, 4, 1e12, 1, wanted), device=quoter.device).plan(
            quoter.quoted(layout)
        )
        trainer, batch = factory(plan=plan, mesh={axis: 2})
        compiled = trainer.compile(batch)
        held = [of.held_bytes for of in compiled.memory_analysis()]
        # Measured: 2 % and, where the last stage is one task, of which a quote has a part of the workspace, 13 %.
        assert plan.peak_bytes == pytest.approx(held, rel=0.15), layout
        assert plan.peak_bytes[0] == pytest.approx(held[0], rel=0.1), layout


def test_the_plan_of_a_quote_trains(tmp_path, capsys):
    file, saved = tmp_path / "train.py", tmp_path / "plan.json"
    file.write_text("from tests.planning.quoting.test_quote import make_four\n")
    command = ["quote", f"{file}:make_four", "--hardware", "h100-sxm", "--depth", "layers", "--devices"]
    assert main([*command, "4", "--price", "2"]) == 0
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("best: ", "a million examples", "simulated"))
    assert max(map(len, shown.splitlines()[:-6])) <= 80
    assert main([*command, "4", "--measure", "--explain", "PP=2,TP=2,MB=6", "--save", str(saved)]) == 0
    shown = capsys.readouterr().out
    assert f"as measured on {jax.devices()[0].device_kind}; links: of h100-sxm" in shown
    assert all(text in shown for text in ("seconds of the busiest rank", "parameters", "rank 0 |"))
    assert max(len(line) for line in shown.splitlines()[:-1] if "makespan" not in line) <= 80
    plan = Plan.load(saved)
    assert (plan.layout["stage"], plan.layout["tensor"]) == (2, 2)
    trainer, batch = make_four(plan=saved, mesh={"tensor": 2})
    assert jnp.isfinite(trainer.train_step(jnp.ones(batch.shape))["loss"])


def test_parameters_gathered_once_cost_bytes_and_save_seconds(quoter: Quoter):
    layout = Layout(pipeline=2, fsdp=4, microbatch=1, stages=2)
    every, once = quoter.quoted(layout), quoter.quoted(replace(layout, gather="step"))
    # Twelve microbatches: a forward gathers, a backward gathers and reduces; the fused last stage gathers once less.
    assert once.parts["fsdp gathers"] < every.parts["fsdp gathers"] / 10
    whole = 4.0 * 4 * 2 * 16 * 64  # of a stage of four blocks
    every, once = (
        quoter.quoted(replace(of.layout, schedule="gpipe")) for of in (every, once)
    )  # both fill one rank most
    for kind, more in (("gradients", 0.75 * whole), ("gathered parameters", whole)):
        assert once.nbytes[kind] - every.nbytes.get(kind, 0.0) == pytest.approx(more)
    assert str(once.layout).startswith("PP 2 x FSDP 4 once, microbatch 1")


def test_a_plan_says_how_often_parameters_are_gathered(quoter: Quoter, tmp_path):
    layout = Layout(pipeline=2, fsdp=2, microbatch=3, stages=2)
    found = Quote(quoter=quoter, ranking=rank(quoter, 1, 1e12, 1), device=quoter.device)
    once = found.plan(quoter.quoted(replace(layout, gather="step")))
    assert Plan.load(once.save(tmp_path / "plan.json")).fsdp == "step"
    with pytest.raises(ValueError, match="fsdp='step' differs from the plan, which has 'microbatch'"):
        make(plan=found.plan(quoter.quoted(layout)), mesh=MeshOptions(fsdp="step"))


def test_experts_are_an_axis_of_a_layout_and_its_plan():
    factory = lambda **options: make(4, axis="expert", **options)  # noqa: E731
    assert not any(of.expert > 1 for of in layouts(trace_model(make), 8))
    found = quote(factory, hardware="h100-sxm", devices=8, wanted={"pipeline": 2, "expert": 4})
    assert found.best.layout.expert == 4
    assert found.best.parts["sums and exchanges"] > 0
    assert " EP " in str(found)
    whole, cut = (
        sum(item.nbytes for item in found.quoter.model.holdings(6, axes) if item.kind == "parameters")
        for axes in (Axes(), Axes(expert=4))
    )
    assert whole - cut == pytest.approx(0.75 * 4.0 * 4 * 16 * 64)  # one of the two products in four blocks
    plan = found.plan()
    assert plan.layout == {"stage": 2, "data": 1, "fsdp": 1, "expert": 4, "tensor": 1}
    trainer, batch = factory(plan=plan)
    assert jnp.isfinite(trainer.train_step(jnp.ones(batch.shape))["loss"])


def test_a_plan_for_more_devices_names_both_numbers(quoter: Quoter):
    layout = Layout(pipeline=4, data=48, microbatch=1, stages=4)
    found = Quote(quoter=quoter, ranking=rank(quoter, 1, 1e12, 1), device=quoter.device)
    with pytest.raises(MeshError, match=r"the plan's layout .*'data': 48.* needs 192 devices, but there are"):
        make(plan=found.plan(quoter.quoted(layout)))


def test_bad_input_is_named(tmp_path, capsys):
    def refused(text: str, error: type[Exception] = ValueError, factory=make, **options):
        with pytest.raises(error, match=text):
            quote(factory, **{"hardware": "a100-80", "devices": 8, "depth": "layers", **options})

    refused("Did you mean .*'h100-sxm'", hardware="h100")
    refused("Did you mean .*'h100-sxm'", hardware="H100")
    refused("devices=0: it must be", devices=0)
    refused("there is no size 'pipline'. Did you mean 'pipeline'", wanted={"pipline": 2})
    axis = lambda layers=8, **options: make(layers, axis="experts", **options)  # noqa: E731
    refused(
        "parameter blocks/0/down/kernel is annotated with 'experts'.*Known: data, fsdp, expert, tensor.*rules",
        factory=axis,
    )
    refused(
        "no layout of 5 devices with {'pipeline': 5, .*annotated",
        devices=5,
        wanted={"pipeline": 5, "data": 1, "microbatch": 7},
    )
    refused("The closest is .*parameters .*Use more devices", ScheduleError, memory=1e4)
    refused("memory=-1.0", memory=-1.0)
    refused("no parameter of this name.*Known: layers, .*whose default is the number of blocks", depth="depth")
    refused("must be the number of blocks.*it has no default", depth="options", factory=lambda **options: None)
    refused("does not take the options of a trainer.*def make", factory=lambda layers=8: None)
    refused(
        "missing 1 required .*'path'.*give other parameters defaults", factory=lambda path, layers=8, **options: None
    )
    reads = lambda model, x: jnp.mean(model(x)) * (1 if jnp.sum(x) > 0 else 2)  # noqa: E731
    refused(
        r"reads the value of an array at .*test_quote.py:[0-9]+\).*, but a quote traces shapes .*jnp.where",
        factory=lambda layers=8, **options: make(layers, loss_fn=reads, **options),
    )
    plain = lambda layers=8, **options: make(0, **options)  # noqa: E731
    refused("the model has no marks.*PipelineStage", AssignmentError, factory=plain, depth=None)
    refused("the batch is 3, without examples", factory=lambda layers=8, **options: (make(layers, **options)[0], 3))
    refused("table of devices 'none.toml': there is no such file", table="none.toml")
    refused("must return a trainer and a batch, got int", factory=lambda layers=8, **options: 3)
    assert main(["quote", "train.py:make", "--hardware", "a100-80", "--devices", "8", "--explain", "PQ=2"]) == 2
    assert "Did you mean 'TP' or 'PP'" in capsys.readouterr().err


def test_a_step_that_closes_over_an_array():
    """Such an array is an operand of the loop, and no argument of the step."""
    table = np.linspace(0, 1, 16, dtype=np.float32)

    def closed(layers: int = 7, **options: Any) -> Any:
        return make(layers, loss_fn=lambda model, x: jnp.mean((model(x) - table) ** 2), **options)

    whole, short = trace_model(make, "layers"), trace_model(closed, "layers")
    assert short.traces[0].updates(Axes()) == whole.traces[0].updates(Axes())
    bytes_of = lambda trace: trace.holdings(Axes())["parameters", (0,)]  # noqa: E731
    assert bytes_of(short.traces[0]) == bytes_of(whole.traces[0])
