"""`Profile` writes a trace of the chosen steps, with the names of tasks and layers."""

from __future__ import annotations

import gzip
import json

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.trainers.callbacks import Callback, Profile
from tests.trainers import models as m
from tests.trainers.sharing import sharing_steps


@sharing_steps()
def trainer(num_stages=2):
    return PipelineTrainer(
        m.Tokens(rngs=nnx.Rngs(0)),
        optax.sgd(0.1),
        m.mean_loss,
        num_stages=num_stages,
        num_microbatches=2,
        logging=False,
    )


def events(folder):
    (file,) = folder.rglob("*.trace.json.gz")
    with gzip.open(file) as opened:
        return json.load(opened)["traceEvents"]


def test_the_trace_names_tasks_and_steps(tmp_path):
    t, seen = trainer(), []

    class Message(Callback):
        def on_fit_start(self, trainer):
            trainer.message = seen.append

    t.fit([m.make_batch(8)], steps=4, callbacks=[Message(), Profile(start=2, steps=2, directory=tmp_path)])
    found = events(tmp_path)
    steps = {e["args"]["step_num"] for e in found if e.get("name") == "train"}
    assert steps == {"2", "3"}
    # The devices' operations tell the task, and the profile holds the scopes of each: see the file for xprof.
    modules = {e["args"]["hlo_module"] for e in found if "hlo_module" in e.get("args", {})}
    assert modules >= {"jit_fwd_0", "jit_fwd_bwd_1", "jit_bwd_0"}
    (file,) = tmp_path.rglob("*.xplane.pb")
    name = t.compile(m.make_batch(8)).stages[0].blocks[0]
    assert f"jvp({name})".encode() in file.read_bytes()
    assert [line for line in seen if line.startswith(f"profile of steps 2 to 3: {tmp_path}")]


def test_steps_count_from_the_beginning_of_fit(tmp_path):
    t = trainer(1)
    t.fit([m.make_batch(8)], steps=3)
    t.fit([m.make_batch(8)], steps=3, callbacks=[Profile(start=1, steps=1, directory=tmp_path)])
    assert {e["args"]["step_num"] for e in events(tmp_path) if e.get("name") == "train"} == {"4"}


def test_an_early_end_writes_the_trace_and_too_few_steps_are_told(tmp_path):
    t, seen = trainer(1), []
    t.fit([m.make_batch(8)], steps=2, callbacks=[Profile(start=2, steps=9, directory=tmp_path)])
    assert events(tmp_path)
    t.message = seen.append
    t.fit([m.make_batch(8)], steps=2, callbacks=[Profile(start=5, directory=tmp_path)])
    assert seen == ["no profile: Profile(start=5), but fit ended after 2 steps"]


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_step_that_fails_during_a_profile_is_the_error_of_fit(tmp_path, num_stages):
    calls = []

    def on_host(_):
        calls.append(None)
        if len(calls) > 2 * 2:  # in the third step of two microbatches
            raise OSError("the cause of the failure")

    def loss_fn(model, batch):
        jax.debug.callback(on_host, batch["tokens"][0, 0])
        return m.mean_loss(model, batch)

    t = PipelineTrainer(
        m.Tokens(rngs=nnx.Rngs(0)), optax.sgd(0.1), loss_fn, num_stages=num_stages, num_microbatches=2, logging=False
    )
    with pytest.raises(Exception, match="the cause of the failure") as raised:
        t.fit([m.make_batch(8)], steps=9, callbacks=[Profile(start=2, steps=8, directory=tmp_path)])
    assert not [note for note in raised.value.__notes__ if "Profile" in note]
    assert events(tmp_path), "the trace is written all the same"


def test_what_does_not_fit_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"Profile: start=0: it must be a whole number of at least 1"):
        Profile(start=0)
    with jax.profiler.trace(tmp_path / "other"):
        jnp.ones(2).block_until_ready()
        with pytest.raises(RuntimeError, match="End the other profile before `fit`, or leave out"):
            trainer(1).fit([m.make_batch(8)], callbacks=[Profile(start=1, directory=tmp_path)])
