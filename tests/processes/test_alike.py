"""Processes that hold different values where all should have the same are told, and do not train on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes.running import run_processes

pytestmark = [pytest.mark.slow, pytest.mark.processes]

# What each case says: "ran", or the values that differ.
EXPECTED = {
    "weights": "the initial state, where all are to have the same: .params['layers'][0]['kernel']",
    "first batch": "the batches for training, where all are to have the same: batch['y']",
    "third batch": "the batches for training, where all are to have the same: batch['y']",
    "last batch": "the batches for training, where all are to have the same: batch['x']",
    "equal": "ran",
    "left out": "ran",
    "evaluation": "the batches for evaluation, where all are to have the same: batch['y']",
    "prediction": "the batches for prediction, where all are to have the same: batch['y']",
    "argument": "where all are to have the same: argument[1]",
    "constant": "where all are to have the same: constant 0, float32[4]",
    "equal arguments": "ran",
}


def test_what_differs_between_processes_is_named():
    for output in run_processes(2, "run_alike.py"):
        cases = dict(
            line.removeprefix("case ").split(": ", 1) for line in output.splitlines() if line.startswith("case ")
        )
        assert cases.keys() == EXPECTED.keys(), output[-3000:]
        for name, expected in EXPECTED.items():
            assert expected in cases[name], (name, cases[name])
            if expected != "ran":
                assert "|   process 0: " in cases[name]
                assert "|   process 1: " in cases[name]
        assert "steps 4\n" in output  # what differs in the third is found after the fourth


# The same for arguments and settings, which differ by less than a value.
DIFFERING = {
    "setting": "process 0: the setting jax_threefry_partitionable is True |   process 1: the setting",
    "hyperparameter": "of the initial state, where all are to have the same: what the optimizer begins with",
    "noise": "of the initial state, where all are to have the same: what the optimizer begins with",
    "equal": "ran",
    "steps": "the arguments of fit. The first difference: |   process 0: steps=2, ",
    "eval_data": "process 0: with eval_data |   process 1: no eval_data",
    "save_every": "process 0: a checkpoint_dir, save_every=2, keep=None |   process 1: a checkpoint_dir, save_every=3",
    "one directory": "process 0: a checkpoint_dir, save_every=None, keep=None |   process 1: no checkpoint_dir",
    "two directories": "process 1 cannot see in ",
    "two files": "process 1 cannot see in ",
    "restore": "what to restore. The first difference: |   process 0: the checkpoint 0, whose file_digests.json",
    "same directory": "ran",
    "one process alone": "ran",
}


def test_arguments_and_settings_that_differ_are_named(tmp_path: Path):
    for output in run_processes(2, "run_differing.py", str(tmp_path)):
        cases = dict(
            line.removeprefix("case ").split(": ", 1) for line in output.splitlines() if line.startswith("case ")
        )
        assert cases.keys() == DIFFERING.keys(), output[-3000:]
        for name, expected in DIFFERING.items():
            assert expected in cases[name], (name, cases[name])
