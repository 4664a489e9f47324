"""`MeshOptions(fsdp=)`: annotated parameters are gathered once in a step, and their optimizer state stays sharded."""

from __future__ import annotations

from collections import Counter

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpp_flax.planning import plan
from jaxpp_flax.trainers import Logging, MeshError, MeshOptions
from tests.helpers import slow, tree_allclose
from tests.matrix.test_fsdp import executed
from tests.trainers.model.test_sharding import STAGES, WIDTH, batch, trainer

RULES = [("batch", ("data", "fsdp")), ("embed", "fsdp"), ("mlp", None)]
CASES = {
    "nnx": ("nnx", {"fsdp": 2}, {"names": ("fsdp", None)}, None, P("fsdp")),
    "linen": ("linen", {"data": 2, "fsdp": 2}, {}, RULES, P("fsdp")),
    "data": ("nnx", {"data": 4}, {"names": ("data", None)}, None, P("data")),
}


NORMS = Logging(metrics=("gradient_norm", "parameter_norm", "update_ratio"), progress=False)


@pytest.mark.parametrize("case", ["nnx", slow("linen"), slow("data")])
def test_a_train_step_gathers_once(case):
    kind, axes, options, rules, spec = CASES[case]
    options = {"logging": NORMS, **options}
    piped = trainer(kind, mesh=MeshOptions(axes=axes, sharding_rules=rules, fsdp="step"), **options)
    planned = plan(piped, batch())
    plain = trainer(kind, mesh=MeshOptions(sharding_rules=rules), stages=1, **options)
    for _ in range(2):
        tree_allclose(*(made.train_step(batch()) for made in (piped, plain)))  # the loss, and norms of all shards
    tree_allclose(*(jax.tree.map(np.asarray, made.state.params) for made in (piped, plain)))
    kernels = [leaf for leaf in jax.tree.leaves(piped.state) if leaf.shape == (WIDTH, 4 * WIDTH)]
    assert [kernel.spec for kernel in kernels] == [spec] * (STAGES * 2), "parameters and momentum stay sharded"
    (compiled,) = piped.steps.compiled.values()
    leaves = Counter(leaf.spec == P() for leaf in jax.tree.leaves(piped.state.params))[False]
    after = executed(compiled, in_loop=False)
    assert after["all-gather"] == after["reduce-scatter"] == leaves
    assert "all-gather" not in executed(compiled, in_loop=True)
    for found, predicted in zip(compiled.memory_analysis(), planned.peak_bytes, strict=True):
        assert predicted == pytest.approx(found.held_bytes, rel=0.05)
    assert float(piped.evaluate([batch()])["loss"]) == pytest.approx(float(plain.evaluate([batch()])["loss"]), rel=1e-5)


def test_what_cannot_be_gathered():
    with pytest.raises(ValueError, match=r"fsdp='always' is no known setting"):
        MeshOptions(fsdp="always")
    with pytest.raises(MeshError, match=r"MeshOptions\(fsdp='step'\) gathers .* Leave fsdp= out, or give axes="):
        trainer("nnx", stages=1, mesh=MeshOptions(fsdp="step"))
    with pytest.raises(ValueError, match=r"fsdp='step' gathers parameters .* but the step has none"):
        trainer("nnx", (None, None), mesh=MeshOptions(axes={"fsdp": 2}, fsdp="step")).train_step(batch())
