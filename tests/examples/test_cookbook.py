"""The recipes of `examples`: each learns at toy size, as its last line says."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.examples.running import run_example

pytestmark = pytest.mark.slow

TINY = ["--layers", "4", "--width", "16", "--length", "16"]


def last_figures(output: str) -> list[float]:
    return [float(figure) for figure in re.findall(r"\d+(?:\.\d+)?", output.splitlines()[-1])]


def test_a_mixture_of_experts_learns_and_stays_even():
    loss, balance, _ = last_figures(run_example("mixture_of_experts.py", "--steps", "100"))
    assert loss < 2, "a uniform guess has 5.5; this setting reached 0.96"
    assert 1 <= balance < 1.5, "all tokens at one expert would have 4"


def test_two_towers_find_their_pairs():
    _, found, _ = last_figures(run_example("two_towers.py", "--steps", "100"))
    assert found > 25, "a guess finds 2 of 100; this setting reached 75"


def test_a_student_learns_from_a_teacher():
    teacher, student = last_figures(run_example("distillation.py", "--steps", "150"))
    assert teacher > 0.6, "a guess has 0.12"
    assert student > 0.6


def test_a_step_of_two_losses_lowers_both():
    found = re.findall(r"loss (\d+\.\d+)  gap (\d+\.\d+)", run_example("own_step.py", "--steps", "300"))
    losses, gaps = zip(*((float(loss), float(gap)) for loss, gap in found), strict=True)
    assert losses[-1] < losses[0] < 1.39, "a uniform guess has log 4"
    assert max(gaps) < 0.05, "unlike answers to both copies have up to 0.5"


def test_texts_of_several_lengths_train_in_one_step():
    output = run_example("lengths.py", "--functions", "300", "--steps", "20", "--microbatches", "4")
    assert "300 functions in microbatches of 16 x 64, 6 x 128, 2 x 256" in output
    (loss,) = last_figures(output)
    assert loss < 5.3, "the first step has 5.7, a uniform guess 5.5"


@pytest.mark.extras
def test_a_run_goes_on_with_the_next_batch_of_grain(tmp_path: Path):
    pytest.importorskip("grain")
    whole = run_example("grain_gpt.py", *TINY, "--steps", "40", "--output", str(tmp_path / "whole"))
    (tmp_path / "cut").mkdir()
    (tmp_path / "whole" / "20").rename(tmp_path / "cut" / "20")
    again = run_example("grain_gpt.py", *TINY, "--steps", "40", "--output", str(tmp_path / "cut"))
    assert "step 21/40" in again
    assert again.splitlines()[-1] == whole.splitlines()[-1]


@pytest.mark.transformers
def test_the_llama_of_an_installed_package_learns_and_its_weights_go_on(tmp_path: Path):
    pytest.importorskip("transformers")
    if int(version("transformers").partition(".")[0]) > 4:
        pytest.skip("transformers 5 has no Flax models")
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    [*_, loss] = last_figures(run_example("installed_llama.py", "--output", first, "--steps", "60"))
    [*_, later] = last_figures(run_example("installed_llama.py", "--model", first, "--output", second, "--steps", "30"))
    assert later < loss < 4, "a uniform guess has 5.5; 100 steps reached 2.84, and 40 more 2.62"
