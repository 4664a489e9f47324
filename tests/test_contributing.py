"""The four additions in CONTRIBUTING.md: each is one file and one line of a table, in a copy of the package."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.helpers import python_blocks
from tests.running import ROOT, free_port

# The model of the program that runs the additions: two stages with a primitive that JAX does not know.
MODEL = """
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core
from jax.interpreters import ad, mlir
from jaxpp_flax import MpmdMesh, mark_stage_end, mpmd_jit_with_loop, schedules, treduce
from jaxpp_flax.engine.tracing.primitives import Batch, facts_of

softsign_p = jex_core.Primitive("softsign")
softsign = lambda x: x / (1 + jnp.abs(x))
softsign_p.def_impl(softsign)
softsign_p.def_abstract_eval(lambda aval: aval)
mlir.register_lowering(softsign_p, mlir.lower_fun(softsign, multiple_results=False))
ad.defjvp(softsign_p, lambda tangent, x: tangent / (1 + jnp.abs(x)) ** 2)


def step(weights, batch, schedule):
    def loss(weights, x):
        hidden = mark_stage_end(softsign_p.bind(x @ weights[0]))
        return jnp.mean(softsign_p.bind(hidden @ weights[1]) ** 2)

    _, gradients = treduce(lambda x: jax.value_and_grad(loss)(weights, x), batch, schedule=schedule)
    return [weight - 0.1 * gradient for weight, gradient in zip(weights, gradients)]


weights = [np.full((4, 4), 0.1 * k + 0.3, np.float32) for k in range(2)]
batch = np.linspace(-1, 1, 3 * 2 * 4, dtype=np.float32).reshape(3, 2, 4)
expected = jax.jit(lambda *arguments: step(*arguments, None))(weights, batch)
"""
ALONE = """
import os, tempfile
from pathlib import Path
mesh = MpmdMesh(jax.sharding.Mesh(np.array(jax.devices()[:2]), ("stage",)), "stage")
schedule = schedules.by_name("last_in_first_out", 2)
assert [task.microbatch for task in schedule.tasks(3)[1]] == [0, 1, 2, 2, 1, 0]
schedules.validate(schedule, 3)
assert facts_of(softsign_p).batch is Batch.ELEMENTWISE
folder = Path(tempfile.mkdtemp())
os.environ["JAXPP_FLAX_DUMP"] = str(folder)
compiled = mpmd_jit_with_loop(lambda *arguments: step(*arguments, schedule), mesh).compile(weights, batch)
(text,) = folder.glob("step_0_*/*_refuse_callbacks.txt")
assert "treduce" in text.read_text()
for made, wanted in zip(compiled(weights, batch), expected):
    np.testing.assert_allclose(np.asarray(made), wanted, rtol=1e-5)  # the sums of a float32 in another order


def calling(weights, batch):
    jax.debug.callback(print, weights[0][0, 0])
    return step(weights, batch, schedule)


try:
    mpmd_jit_with_loop(calling, mesh)(weights, batch)
except ValueError as error:
    assert "calls the host by `debug_callback`" in str(error), error
else:
    raise SystemExit("the added pass has refused nothing")
"""
TOGETHER = """
import os, sys
from jaxpp_flax.engine.runtime.transport.connection import process_connection

jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
mesh = MpmdMesh(jax.sharding.Mesh(np.array(jax.devices()), ("stage",)), "stage")
compiled = mpmd_jit_with_loop(lambda *arguments: step(*arguments, schedules.by_name("1f1b", 2)), mesh)
made = compiled(weights, batch)
assert type(process_connection().transport).__name__ == "Folder"
own = int(sys.argv[2])
np.testing.assert_allclose(np.asarray(made[own].to_mpmd_local_array), expected[own], rtol=1e-5)  # as above
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with the package, and the additions of CONTRIBUTING.md in it."""
    folder = tmp_path_factory.mktemp("added")
    package = folder / "jaxpp_flax"
    shutil.copytree(ROOT / "jaxpp_flax", package, ignore=shutil.ignore_patterns("__pycache__"))
    added = [block for block in python_blocks(ROOT / "CONTRIBUTING.md") if block.startswith("# ")]
    assert len(added) == 7
    for block in added:
        first, _, text = block.partition("\n")
        name, _, place = first.removeprefix("# ").partition(", after ")
        if place:
            insert(package / name, place.strip('"'), text)
        else:
            assert not (package / name).exists()
            (package / name).write_text(text, encoding="utf-8")
    return folder


def insert(file: Path, place: str, text: str) -> None:
    """Put lines behind the only line that is the place, and their imports at the top."""
    imports = "".join(line for line in text.splitlines(keepends=True) if line.startswith("from "))
    rest = "".join(line for line in text.splitlines(keepends=True) if not line.startswith("from "))
    old = file.read_text(encoding="utf-8")
    head = "from __future__ import annotations\n"
    assert old.count(f"\n{place}\n") == 1 == old.count(head), f"{file.name} has changed: {place}"
    new = old.replace(f"\n{place}\n", f"\n{place}\n{rest}").replace(head, head + imports)
    file.write_text(new, encoding="utf-8")


def start(folder: Path, program: str, *arguments: str, devices: int, **environment: str) -> subprocess.Popen[str]:
    """Start a program that imports the copy."""
    file = folder / f"program_{devices}.py"
    file.write_text(program, encoding="utf-8")
    flags = f"--xla_force_host_platform_device_count={devices}"
    of: Mapping[str, str] = {"PYTHONPATH": str(folder), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, **environment}
    return subprocess.Popen(
        [sys.executable, str(file), *arguments],
        env={**os.environ, **of}, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def test_a_primitive_a_pass_and_a_schedule_are_a_file_and_a_line(copy: Path):
    program = start(copy, MODEL + ALONE, devices=2)
    output, _ = program.communicate(timeout=120)
    assert program.returncode == 0, output


@pytest.mark.processes
def test_a_transport_is_a_file_and_a_line(copy: Path, tmp_path: Path):
    # The coordinator's processes begin before JAX's first use.
    text = MODEL + TOGETHER
    begin = re.search(r"(?m)^jax.distributed.initialize.*\n", text)
    assert begin
    text = "import sys, jax\n" + begin[0] + text.replace(begin[0], "")
    address = f"127.0.0.1:{free_port()}"
    started = [
        start(copy, text, address, str(index), devices=1, JAXPP_FLAX_TRANSPORT="folder", TMPDIR=str(tmp_path))
        for index in range(2)
    ]
    outputs = [process.communicate(timeout=180)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n".join(outputs)
    assert len(list(tmp_path.glob("*.npz"))) >= 6, "an activation and a cotangent for each of three microbatches"
