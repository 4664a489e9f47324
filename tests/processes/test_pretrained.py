"""Weights in and out as several processes: each reads its own ranks' leaves, and all write the same files as one."""

from __future__ import annotations

from pathlib import Path

import pytest
from flax import nnx

from jaxpp_flax.layers import merge_lora
from jaxpp_flax.pretrained import export_pretrained
from tests.helpers import slow
from tests.processes.running import run_processes, told
from tests.trainers.divided import make_trainer
from tests.trainers.models import Model

pytestmark = pytest.mark.processes


def write_weights(folder: Path) -> Path:
    return export_pretrained(nnx.state(Model(4, rngs=nnx.Rngs(3)), nnx.Param), folder / "in", max_shard_bytes=1000)


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize(("count", "ranks"), [slow(2, 2), (4, 2), slow(4, 4)], ids=["2", "2x2", "4"])
def test_the_files_come_back_nobody_reads_all_and_a_full_disk_leaves_nothing(tmp_path: Path, count: int, ranks: int):
    source = write_weights(tmp_path)
    outputs = [told(of) for of in run_processes(count, "run_pretrained.py", str(tmp_path), str(ranks))]
    assert files(tmp_path / "out") == files(source)
    assert {file.name for file in tmp_path.iterdir()} == {"in", "out"}, (
        "a write that failed in one process has left something"
    )
    assert len({of["loss"] for of in outputs}) == 1
    names = set().union(*(of["read"] for of in outputs))
    assert len(names) == 19
    for process, of in enumerate(outputs):
        rank = process * ranks // count
        # Blocks 0 and 2 are on the first of two ranks.
        blocks = {name.split(".")[1] for name in of["read"] if name.startswith("blocks.")}
        assert blocks == {str(block) for block in range(4) if block % ranks == rank}
        assert ("embed.embedding" in of["read"]) == (rank == 0)
        assert ("head.kernel" in of["read"]) == (rank == ranks - 1)


def test_parts_of_a_model_come_back_bit_by_bit_on_other_stages_and_processes(tmp_path: Path):
    """Adapters alone, kernels that two processes divide, a checkpoint of Orbax: out of four processes, into one."""
    run_processes(4, "run_parts_of_weights.py", str(tmp_path))
    assert files(tmp_path / "all again") == files(tmp_path / "all")
    for again in ("merged again", "merged of adapters"):
        assert files(tmp_path / again) == files(tmp_path / "merged"), again
    first = make_trainer(2)
    merged = merge_lora(first.gather_model())
    export_pretrained(nnx.state(merged, nnx.Param), tmp_path / "here", max_shard_bytes=1000)
    assert files(tmp_path / "here") == files(tmp_path / "first merged")
    for how in ("restore", "adapters", "load_pretrained"):
        trainer = make_trainer(1, seed=0 if how == "adapters" else 5)
        if how == "restore":
            trainer.restore(tmp_path / "run")
        elif how == "adapters":
            trainer.restore(tmp_path / "adapters", only="params/*")
        else:
            trainer.load_pretrained(tmp_path / "run")
        written = trainer.export_pretrained(tmp_path / f"one {how}", merge_adapters=False, max_shard_bytes=1000)
        assert files(written) == files(tmp_path / "all"), how
