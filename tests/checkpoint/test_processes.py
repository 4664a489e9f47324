"""Checkpoints of several processes: any number of them to any other, and to stock Orbax and back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.checkpoint.layouts import make_state
from tests.checkpoint.processes import run
from tests.running import run_python

pytestmark = pytest.mark.processes

# Stock Orbax alone, told where to put the leaves, since the writers' devices are not here.
READER = """
import sys
sys.modules["jaxpp_flax"] = None
import jax, orbax.checkpoint as ocp
here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
for path in sys.argv[1:]:
    with ocp.StandardCheckpointer() as checkpointer:
        leaves = checkpointer.metadata(path).item_metadata.tree
        target = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), leaves)
        tree = checkpointer.restore(path, target)
    print(sorted(tree), len(jax.tree.leaves(tree)), tree["params"]["embed"].sum())
"""

# With 2 devices in a process: 2 stages in each process; one in each; stages of 2 processes; leaves that are in none of
# the processes 0 and 2; two processes with nothing at all.
FROM = ["8 stages", "4 stages x fsdp", "stages of 2 processes", "other devices", "2 stages x data"]


def test_four_to_two_to_one_to_stock_orbax_and_back(tmp_path: Path):
    four = {name: (seed, str(tmp_path / f"four {seed}")) for seed, name in enumerate(FROM)}
    run(4, [("save", name, *at) for name, at in four.items()])
    two = {name: (seed, str(tmp_path / f"two {seed}")) for seed, name in enumerate(FROM)}
    turned = dict(zip(FROM, [*FROM[1:], FROM[0]], strict=True))  # each onto the layout after it
    run(2, [("restore", turned[name], *at) for name, at in four.items()] + [("save", n, *at) for n, at in two.items()])
    jobs = [("restore", "interleaved", *at) for at in two.values()] + [
        ("restore", "one device", *at) for at in four.values()
    ]
    one = str(tmp_path / "one")
    plain = str(tmp_path / "plain")
    run(1, [*jobs, ("save", "2 stages x tensor", 7, one), ("stock_save", 8, plain)])
    (tmp_path / "reader.py").write_text(READER)
    written = [*four.values(), *two.values()]
    done = run_python("-I", str(tmp_path / "reader.py"), *(path for _, path in written), cwd=tmp_path, XLA_FLAGS="")
    for (seed, _), line in zip(written, done.stdout.splitlines(), strict=True):
        assert line.startswith("['model_state', 'opt_state', 'params', 'step'] 21 ")
        total = float(np.asarray(make_state(seed)["params"]["embed"]).sum())
        np.testing.assert_allclose(float(line.split()[-1]), total, rtol=1e-5)
    back = [("restore", name, 7, one) for name in FROM] + [("restore_params", name, 8, plain) for name in FROM]
    outputs = run(4, back)
    # Every process has compared what it owns; only process 1 has a part in every layout.
    assert all(output.count("compared") == len(back) for output in outputs)
    assert ["compared 0\n" in output for output in outputs] == [True, False, True, True]


def test_a_run_of_four_goes_on_as_one_of_two(tmp_path: Path):
    directory = str(tmp_path / "run")
    run(4, [("store", "stages of 2 processes", directory, 1, 3)])
    (tmp_path / "run" / "4.orbax-checkpoint-tmp").mkdir()  # what a killed save leaves
    run(2, [("restore", "4 stages", 3, f"{directory}/3"), ("store", "8 stages", directory, 4, 5)])
    run(1, [("restore", "2 stages", 5, f"{directory}/5")])
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["4", "5"]


def test_every_process_hears_of_what_is_wrong(tmp_path: Path):
    """Damage that one process finds, paths that exist, checkpoints that do not fit, and Orbax's own checkpointer."""
    path = tmp_path / "ckpt"
    jobs = [
        ("save", "4 stages x fsdp", 1, str(path)),
        ("standard", "stages of 2 processes", "other devices", 2, str(tmp_path / "standard")),
        ("fails", "it exists", "save", "8 stages", 1, str(path)),
        ("fails", "does not fit the target", "restore_params", "8 stages", 1, str(path)),
    ]
    run(4, jobs)
    assert "embed" in (tmp_path / "standard" / "_METADATA").read_text()
    data = max((path / "d").iterdir(), key=lambda file: file.stat().st_size)
    data.write_bytes(data.read_bytes()[:-1])
    outputs = run(2, [("fails", data.name, "restore", "8 stages", 1, str(path))])
    assert all("failed as it should" in output for output in outputs)
