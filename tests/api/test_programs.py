"""The programs of `examples/jaxpp`, which are those that JaxPP's documentation shows: equal to plain JAX to 1e-5."""

from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np
import pytest

from jaxpp_flax.api import MpmdArray
from tests.examples.running import load_example
from tests.helpers import tree_allclose


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "final_mark"), [(2, "yes"), (4, "no")])
def test_manual_stages_with_both_placements_of_marks(stages: int, final_mark: str):
    example = load_example("jaxpp/manual_stages.py")
    example.main.__globals__["MICROBATCHES"] = 2  # the plain step compiles each of them
    plain, pipelined = example.main(["--stages", str(stages), "--final-mark", final_mark])
    tree_allclose(pipelined, plain)


@pytest.mark.slow
def test_basic_in_float32(capsys: pytest.CaptureFixture[str]):
    difference, tolerance = load_example("jaxpp/basic.py").main(["--train_steps", "10", "--num_ubatches", "4"])
    assert tolerance == 1e-5
    # The example itself fails where a result of the first step differs by more; rounding then grows for ten steps.
    assert difference <= 1e-5
    assert "[0010/0010] plain" in capsys.readouterr().out


@pytest.mark.slow
def test_basic_in_float16():
    # 2 ** -8 is 8 units in the last place: the example says why. The steps that follow amplify it, hence one step.
    arguments = ["--train_steps", "1", "--num_ubatches", "4", "--dtype", "float16"]
    difference, tolerance = load_example("jaxpp/basic.py").main(arguments)
    assert difference <= tolerance == 2**-8


@pytest.fixture(scope="module")
def tutorial() -> Any:
    return load_example("jaxpp/tutorial.py")


@pytest.mark.slow
def test_tutorial(tutorial: Any, capsys: pytest.CaptureFixture[str]):
    (plain, plain_losses), (updated, losses), (interleaved, interleaved_losses) = tutorial.main()
    # Losses of four steps of Adam; its parameters are compared by way of them, since Adam divides by gradients' sizes.
    np.testing.assert_allclose(losses, plain_losses, rtol=1e-5)
    np.testing.assert_allclose(interleaved_losses, plain_losses, rtol=1e-5)
    for state in (updated, interleaved):
        assert int(state.step) == int(plain.step) == 4
        assert jax.tree.structure(state.params) == jax.tree.structure(plain.params)
    owners = [updated.params[f"block_{i}"]["Dense_0"]["kernel"].mpmd_idxs for i in range(8)]
    assert owners == [(0,), (0,), (1,), (1,), (2,), (2,), (3,), (3,)]
    owners = [interleaved.params[f"block_{i}"]["Dense_0"]["kernel"].mpmd_idxs for i in range(8)]
    assert owners == [(0,), (1,), (2,), (3,)] * 2
    count = interleaved.opt_state[0].count
    assert [int(part) for part in count._partially_addressable_arrays.values()] == [4] * 4

    printed = capsys.readouterr().out
    kernel = "MpmdArray(shape=(64, 16), dtype=float32, mpmd_idxs=({},), sharding=NamedSharding(mesh=Mesh('stage': 1, "
    assert f"layer_3 {kernel.format(1)}" in printed
    assert f"layer_3 {kernel.format(3)}" in printed
    assert "MpmdArray(shape=(), dtype=int32, mpmd_idxs=(0, 1, 2, 3), sharding=NamedSharding(mesh=Mesh('stage': 4, " in (
        printed
    )
    assert str(["fwd_2__0", "fwd_2__1", "fwd_2__2", "bwd_2__0", "fwd_2__3", "bwd_2__1", "bwd_2__2", "bwd_2__3"]) in (
        printed
    )
    assert str([f"FusedTask(fwd_3__{m}, bwd_3__{m})" for m in range(4)]) in printed
    first = ["fwd_0", "fwd_4", "bwd_4", "bwd_0"]
    assert str([f"{task}__{m}" for task in first for m in range(4)]) in printed
    last = [f"fwd_3__{m}" for m in range(4)] + [f"FusedTask(fwd_7__{m}, bwd_7__{m})" for m in range(4)]
    assert str(last + [f"bwd_3__{m}" for m in range(4)]) in printed
    assert re.search(r"rank 0: v\d+(, v\d+)* = fwd_0__0\(", printed)
    assert re.search(r"rank 0 -> rank 1: send s\d+ receive s\d+\n", printed)


def test_resharding(capsys: pytest.CaptureFixture[str]):
    (w1, w2, x), gradient, moved_back = load_example("jaxpp/resharding.py").main()
    expected = jax.tree.map(lambda *parts: sum(parts), *(gradient((w1, w2), one) for one in x))
    tree_allclose(moved_back, list(expected))
    assert all(isinstance(g, jax.Array) for g in moved_back)
    assert "w1.is_deleted()=True w2.is_deleted()=True x.is_deleted()=True" in capsys.readouterr().out


GPT2 = {
    "layers-per-stage": 1, "global-batch": 8, "num-ubatches": 2, "seq-len": 8, "vocab-size": 32, "d-model": 16,
    "n-heads": 8, "mlp-dim": 32, "train-steps": 3, "log-every": 3, "profile-start": 0, "profile-stop": 1,
}  # fmt: skip


def gpt2_flags(**changed: Any) -> list[str]:
    flags = GPT2 | {name.replace("_", "-"): value for name, value in changed.items()}
    return [text for name, value in flags.items() for text in (f"--{name}", str(value))]


@pytest.mark.slow
def test_gpt2_as_a_pipeline_and_with_data_and_tensor_parallelism(capsys: pytest.CaptureFixture[str]):
    results = load_example("jaxpp/gpt2.py").main(gpt2_flags())
    losses = {system: sums for system, (_, sums, _) in results.items()}
    assert list(losses) == ["spmd_dp", "spmd_tp", "jaxpp"]
    for system in losses:
        assert len(losses[system]) == 4, "three steps and the warm-up"
        assert losses[system][-1] < losses[system][0]
        np.testing.assert_allclose(losses[system], losses["spmd_dp"], rtol=1e-5, err_msg=system)
    kernel = results["jaxpp"][0][1]["params"]["blocks_1"]["up"]["kernel"]
    assert isinstance(kernel, MpmdArray)
    assert kernel.mpmd_idxs == (1,)
    assert kernel.sharding.shard_shape(kernel.shape) == (16, 16)
    printed = capsys.readouterr().out
    for system in losses:
        assert re.search(rf"^\[{system} 0003/0003\] loss_sum=\d+\.\d{{6}} step=\d+\.\d{{3}} ms$", printed, re.MULTILINE)
        assert re.search(
            rf"^\[{system}\] avg step time per step after profiling \(steps 1\.\.2\): ", printed, re.MULTILINE
        )
        assert re.search(rf"^{system} +\d+\.\d{{3}} +\d+( +\d+\.\d{{3}}){{3}}$", printed, re.MULTILINE)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"pp": 4, "dp": 4}, "--pp x --dp x --tp is 32, but there are 8 devices"),
        ({"global_batch": 4}, "--global-batch 4 cannot be divided by 8, the devices that share it"),
        ({"n_heads": 4}, "--n-heads 4 cannot be divided by 8, the devices that share it"),
        ({"d_model": 12}, "--d-model 12 cannot be divided by --n-heads 8"),
        ({"profile_stop": 3}, "--profile-start 0, --profile-stop 3, --train-steps 3 must grow in this order"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit_gpt2(changed: dict[str, int], message: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        load_example("jaxpp/gpt2.py").main(gpt2_flags(**changed))
    assert message in capsys.readouterr().err
