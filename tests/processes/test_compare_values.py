"""Processes that hold different values where all should have the same are told, and do not train on."""

from __future__ import annotations

import pytest

from tests.processes.running import run_processes, said_of_cases

pytestmark = pytest.mark.processes

# What each case says: "ran", or the values that differ.
EXPECTED = {
    "weights": "the initial state, where all must have the same: params/layers/0/kernel",
    "first batch": "the batches for training, batches 1 to 1, where all must have the same: batch['y']",
    "third batch": "the batches for training, steps 3 to 4, where all must have the same: batch['y']",
    "last batch": "the batches for training, steps 5 to 7, where all must have the same: batch['x']",
    "before a save": "the batches for training, steps 3 to 3, where all must have the same: batch['y']",
    "equal": "ran",
    "left out": "ran",
    "evaluation": "the batches for evaluation, batches 2 to 3, where all must have the same: batch['y']",
    "prediction": "the batches for prediction, batches 1 to 1, where all must have the same: batch['y']",
    "argument": "where all must have the same: argument[1]. |   process 0: 1.0 |   process 1: 2.0 | ",
    "constant": "where all must have the same: constant 0, float32[4]",
    "equal arguments": "ran",
}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What both processes printed of all cases."""
    return run_processes(2, "run_compare_values.py", str(tmp_path_factory.mktemp("values")))


@pytest.mark.parametrize("name", EXPECTED)
def test_what_differs_between_processes_is_named(outputs: list[str], name: str):
    for output in outputs:
        said = said_of_cases(output)[name]
        assert EXPECTED[name] in said
        if EXPECTED[name] != "ran":
            assert "|   process 0: " in said
            assert "|   process 1: " in said


def test_every_case_is_expected(outputs: list[str]):
    for output in outputs:
        assert said_of_cases(output).keys() == EXPECTED.keys()
        assert "steps 4\n" in output  # what differs in the third is found after the fourth
        assert "saved [1, 2]\n" in output  # and before a third that is to be saved


# The same for arguments and settings, which differ by less than a value.
DIFFERING = {
    "setting": "process 0: the setting jax_threefry_partitionable is True |   process 1: the setting",
    "hyperparameter": "/learning_rate. It is one of 2 that differ. |   process 0: 0.1 |   process 1: 0.2",
    "noise": "of the initial state, where all must have the same: what the optimizer begins with",
    "equal": "ran",
    "steps": "the arguments of fit. The first difference: |   process 0: steps=2, ",
    "eval_data": "process 0: with eval_data |   process 1: no eval_data",
    "every": "process 0: checkpoints, every=2, keep=None, memory_every=None |   process 1: checkpoints, every=3",
    "one directory": "process 0: checkpoints, every=None, keep=None, memory_every=None |   process 1: no checkpoints",
    "two directories": "process 1 cannot see in ",
    "two files": "process 1 cannot see in ",
    "restore": "what to restore. The first difference: |   process 0: the checkpoint 0, whose manifest.ocdbt",
    "same directory": "ran",
    "one process alone": "ran",
}


@pytest.fixture(scope="module")
def outputs_of_arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The same for arguments and settings."""
    return run_processes(2, "run_differing.py", str(tmp_path_factory.mktemp("differing")))


@pytest.mark.parametrize("name", DIFFERING)
def test_arguments_and_settings_that_differ_are_named(outputs_of_arguments: list[str], name: str):
    for output in outputs_of_arguments:
        assert said_of_cases(output).keys() == DIFFERING.keys()
        assert DIFFERING[name] in said_of_cases(output)[name]
