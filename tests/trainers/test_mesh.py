"""The devices that a trainer takes: all of them, and fewer where the user says so."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.trainers import BatchError, Logging, MeshError, MeshOptions
from jaxpp_flax.trainers.mesh import build_mesh, describe_mesh, inner_sizes
from tests.helpers import tree_allclose
from tests.trainers import models as m

pytestmark = pytest.mark.usefixtures("all_devices")


def trainer(num_stages, num_microbatches=4, logging=False, **options):
    return PipelineTrainer(
        m.Layers(4), optax.sgd(0.1), m.squared_error, num_stages=num_stages,
        num_microbatches=num_microbatches, logging=logging, **options,
    )  # fmt: skip


def test_all_devices_are_used_and_the_title_of_the_table_names_them(capsys):
    four, plain, batch = trainer(4, logging=Logging()), trainer(1, mesh={}), m.make_xy(8)
    assert plain.mesh is None
    four.compile(batch)
    losses = [float(t.train_step(batch)["loss"]) for t in (four, plain) for _ in range(2)]
    np.testing.assert_allclose(losses[:2], losses[2:], rtol=1e-5)
    tree_allclose(*(jax.tree.map(np.asarray, t.state.params) for t in (four, plain)), rtol=1e-4)
    assert four.mesh.jax_mesh.devices.tolist() == np.array(jax.devices()).reshape(4, 2).tolist()
    assert "4 stages on 4 ranks x data 2, all 8 devices (cpu), " in " ".join(capsys.readouterr().out.split())


def test_what_a_user_says_of_devices_holds():
    for options, sizes, count in [
        ({"num_stages": 1}, {"data": 8}, 8),
        ({"num_stages": 2}, {"data": 4}, 8),
        ({"num_stages": 8}, {}, 8),
        ({"num_stages": 4, "mesh": MeshOptions(num_ranks=2), "schedule": "interleaved_1f1b"}, {"data": 4}, 8),
        ({"num_stages": 4, "mesh": {}}, {}, 4),
        ({"num_stages": 3, "mesh": {"data": 2}}, {"data": 2}, 6),
        ({"num_stages": 1, "mesh": {"data": 1}}, {"data": 1}, 1),
    ]:
        mesh = trainer(**options).mesh
        assert (inner_sizes(mesh), mesh.jax_mesh.size) == (sizes, count), options
    assert describe_mesh(build_mesh(2, {"data": 2})) == "2 ranks x data 2, 4 of 8 devices: 0, 1, 2, 3 (cpu)"


def test_where_devices_do_not_divide_the_numbers_that_do_are_named():
    with pytest.raises(
        MeshError,
        match=r"8 devices \(cpu\) cannot be divided evenly among 3 ranks: 1, 2, 4, 8 ranks are possible.*"
        r"mesh={'data': 2} takes 6 of the 8, and mesh={} one for each rank",
    ):
        trainer(3)
    with pytest.raises(MeshError, match=r"mesh={'data': 1} takes 5 of the 8\."):
        trainer(5)
    with pytest.raises(
        BatchError, match=r"a microbatch of 6 examples .* by the 4 .* a multiple of 16, .* mesh={'data': 2}\."
    ):
        trainer(2).train_step(m.make_xy(24))
