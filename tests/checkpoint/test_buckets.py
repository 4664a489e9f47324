"""Checkpoints and logs in buckets, against servers on loopback."""

from __future__ import annotations

import json
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath

from jaxpp_flax.checkpoint import (
    CheckpointSaveError,
    DirectoryInUseError,
    UnfinishedCheckpointError,
    leaves_of,
    restore,
    save,
)
from jaxpp_flax.checkpoint.best import Best
from jaxpp_flax.checkpoint.checkpoint_store import CheckpointStore
from jaxpp_flax.pretrained import export_pretrained, load_pretrained
from jaxpp_flax.processes.group import process_group
from jaxpp_flax.trainers import Checkpoints
from jaxpp_flax.trainers.trackers import JsonlTracker
from tests.checkpoint.program import batches, make_trainer
from tests.checkpoint.storage_server import BUCKET, Faults, storage_server

pytestmark = [pytest.mark.extras, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.fixture(scope="module")
def server():
    pytest.importorskip("gcsfs")
    with storage_server() as (address, faults, storage), pytest.MonkeyPatch.context() as patch:
        # The first four are `gcsfs`', the others TensorStore's, which reads them once in a process.
        patch.setenv("STORAGE_EMULATOR_HOST", address)
        patch.setenv("GOOGLE_CLOUD_PROJECT", "test")
        patch.setenv("NO_GCE_CHECK", "true")
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        patch.setenv("TENSORSTORE_GCS_HTTP_URL", address)
        patch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "any")
        yield faults, storage


@pytest.fixture
def faults(server: tuple[Faults, Any]):
    yield server[0]
    server[0].refuses = Faults.refuses


@pytest.fixture
def folder(server: Any, request: pytest.FixtureRequest) -> str:
    return f"gs://{BUCKET}/{request.node.name}"


def tree(value: float) -> dict[str, Any]:
    return {"w": jnp.full((4, 3), float(value)), "b": np.arange(3.0) * value}


def test_a_tree_is_saved_and_restored_by_us_and_by_stock_orbax(folder: str):
    path = save(f"{folder}/first", tree(2))
    assert str(path) == f"{folder}/first"
    jax.tree.map(np.testing.assert_array_equal, restore(path, tree(0)), tree(2))
    assert leaves_of(str(path)).keys() == {"w", "b"}
    with ocp.StandardCheckpointer() as stock:
        np.testing.assert_array_equal(stock.restore(str(path), tree(0))["w"], tree(2)["w"])
    with pytest.raises(CheckpointSaveError, match="it exists"):
        save(path, tree(1))


def test_steps_are_kept_ranked_and_removed(folder: str):
    epath.Path(f"{folder}/logs/events").write_text("of another program")
    store = CheckpointStore(folder, every=1, keep=2, best=Best("loss"))
    for step, loss in [(1, 3.0), (2, 1.0), (3, 2.0), (4, 2.0)]:
        store.save(step, tree(step), {"about": {}}, metrics={"loss": loss}, wait=True)
    assert (store.steps(), store.latest(), store.best()) == ((2, 3, 4), 4, 2)
    assert CheckpointStore(folder).steps() == (2, 3, 4)
    names = {path.name for path in epath.Path(folder).iterdir()}
    assert names == {"2", "3", "4", "logs"}, "neither a lock file nor remains"
    aside = store.set_aside(4)
    assert (aside.name, store.steps()) == ("4.damaged", (2, 3))
    store.save(5, tree(5), {}, wait=True)
    assert (epath.Path(folder) / "4.damaged" / "state").exists()
    store.close()


def test_a_run_is_resumed_with_equal_bits(folder: str):
    whole = make_trainer(None)
    whole.fit(batches(), steps=4)
    make_trainer(Checkpoints(folder, every=2)).fit(batches(), steps=2)
    resumed = make_trainer(Checkpoints(folder, every=2), stages=1)  # on another layout
    resumed.restore("latest")
    assert resumed.step == 2
    resumed = make_trainer(Checkpoints(folder, every=2))
    resumed.fit(batches(), steps=4, resume=True)
    jax.tree.map(np.testing.assert_array_equal, resumed.state.params, whole.state.params)
    assert CheckpointStore(folder).steps() == (2, 4)


def test_a_server_that_fails_in_a_save_leaves_the_checkpoint_before(folder: str, faults: Faults):
    store = CheckpointStore(folder, every=1)
    store.save(1, tree(1), {"about": {}}, wait=True)
    written = []

    def refuse(method: str, address: str) -> int | None:
        if method in ("POST", "PUT") and "%2F2%2Fstate" in address.replace("/", "%2F"):
            written.append(address)
            return 403 if len(written) > 2 else None
        return None

    faults.refuses = refuse
    with pytest.raises(CheckpointSaveError, match=r"saving to gs://.*/2 failed"):
        store.save(2, tree(2), {"about": {}}, wait=True)
    assert len(written) > 2
    assert (store.steps(), CheckpointStore(folder).latest()) == ((1,), 1)
    with pytest.raises(UnfinishedCheckpointError, match="a save that was cut off"):
        restore(f"{folder}/2", tree(0))
    # Orbax writes this file beside the first arrays: a save may end before it.
    (epath.Path(folder) / "2" / "_CHECKPOINT_METADATA").unlink(missing_ok=True)
    with pytest.raises(UnfinishedCheckpointError, match="a save that was cut off"):
        restore(f"{folder}/2", tree(0))
    jax.tree.map(np.testing.assert_array_equal, restore(f"{folder}/1", tree(0)), tree(1))
    faults.refuses = Faults.refuses
    store.save(2, tree(2), {"about": {}}, wait=True)  # what the failed save left is gone
    jax.tree.map(np.testing.assert_array_equal, restore(f"{folder}/2", tree(0)), tree(2))
    store.close()


def test_a_server_that_is_away_for_a_moment_delays_a_save(folder: str, faults: Faults):
    end = time.monotonic() + 1.0
    faults.refuses = lambda method, address: 503 if time.monotonic() < end else None
    path = save(f"{folder}/first", tree(2))
    assert time.monotonic() > end
    jax.tree.map(np.testing.assert_array_equal, restore(path, tree(0)), tree(2))


def test_weights_of_a_bucket_are_orbaxs(folder: str):
    save(f"{folder}/first", tree(2))
    target = {"w": jnp.zeros((4, 3)), "b": np.zeros(3)}
    jax.tree.map(np.testing.assert_array_equal, load_pretrained(f"{folder}/first", target), tree(2))
    epath.Path(f"{folder}/hub/model.safetensors").write_text("")
    for call in (lambda: load_pretrained(f"{folder}/hub", target), lambda: export_pretrained(target, f"{folder}/out")):
        with pytest.raises(ValueError, match=r"on disks alone\. Mount the bucket"):
            call()


def test_two_jobs_in_one_place(folder: str, monkeypatch: pytest.MonkeyPatch):
    first, second = CheckpointStore(folder), CheckpointStore(folder)
    first.begin()
    with monkeypatch.context() as patch:
        patch.setattr(process_group(), "life", "another")
        second.save(1, tree(1), {}, wait=True)
    with pytest.raises(DirectoryInUseError, match=r"step 1 has appeared there .* life another"):
        first.save(2, tree(1), {})
    assert first.steps() == (1,)
    second.close()


def log_and_read(path: str) -> None:
    for step in (1, 2):
        tracker = JsonlTracker(path)
        tracker.log({"loss": 0.5}, step=step)
        tracker.log({"loss": 0.25}, step=step)
        tracker.close()
    lines = [json.loads(line) for line in epath.Path(path).read_text().splitlines()]
    assert [(of["step"], of["loss"]) for of in lines] == [(1, 0.5), (1, 0.25), (2, 0.5), (2, 0.25)]


def test_logs_in_a_bucket_of_google(folder: str):
    log_and_read(f"{folder}/metrics.jsonl")


def test_logs_in_a_bucket_of_s3(monkeypatch: pytest.MonkeyPatch):
    """Orbax writes no arrays there, which is said at once (`test_checkpoint_store.py`)."""
    server_of = pytest.importorskip("moto.server").ThreadedMotoServer
    files = pytest.importorskip("s3fs")
    s3 = server_of("127.0.0.1", 0, verbose=False)
    s3.start()
    try:
        host, port = s3.get_host_and_port()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "any")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "any")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        files.S3FileSystem().mkdir(BUCKET)
        log_and_read(f"s3://{BUCKET}/run/metrics.jsonl")
        epath.Path(f"s3://{BUCKET}/hub/model.safetensors").write_text("")
        with pytest.raises(ValueError, match=r"on disks alone\. Mount the bucket"):
            load_pretrained(f"s3://{BUCKET}/hub", {})
    finally:
        s3.stop()
