"""The command line finds a schedule, and writes it."""

from __future__ import annotations

import pytest

from jaxpp_flax.planning.cli import _parser, main
from jaxpp_flax.schedules import read_csv


def test_search(tmp_path, capsys):
    file, picture = tmp_path / "mine.csv", tmp_path / "mine.svg"
    options = ["--ranks", "2", "--microbatches", "4", "--weight-gradient", "0.5,1", "--evaluations", "50"]
    assert main(["search", *options, "--csv", str(file), "-o", str(picture)]) == 0
    assert "lower bound" in capsys.readouterr().out
    assert read_csv(file).num_microbatches == 4
    assert picture.exists()
    assert main(["search", "--forward", "fast"]) == 1
    assert "--forward 'fast': give one number" in capsys.readouterr().err


def test_every_flag_is_explained():
    (commands,) = (action for action in _parser()._actions if action.choices)
    for action in commands.choices["search"]._actions:
        assert action.help, action.option_strings or action.dest


@pytest.mark.parametrize("name", ["search", "Found", "measured_costs", "planning"])
def test_the_old_names_say_where_the_new_ones_stand(name):
    from jaxpp_flax import schedules

    with pytest.raises(AttributeError, match=rf"schedules has no {name}: .* `jaxpp_flax.planning`"):
        getattr(schedules, name)
