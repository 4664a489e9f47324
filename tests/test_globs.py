"""One rule for globs, wherever the package takes them."""

from __future__ import annotations

import pytest

from jaxpp_flax.checkpoint.format.paths import choose
from jaxpp_flax.engine.tracing.markers import Mark
from jaxpp_flax.globs import matches
from jaxpp_flax.planning import by_name
from jaxpp_flax.trainers.model.frozen import frozen_filter

CASES = [
    ("blocks/0/kernel", "blocks/0/kernel", True),
    ("blocks/0/kernel", "blocks/*", True),
    ("blocks/0/kernel", "*kernel", True),
    ("blocks/0/kernel", "blocks/[12]/*", False),
    ("blocks/0/kernel", "blocks", True),  # a beginning up to a slash
    ("blocks/0/kernel", "blocks/", True),
    ("blocks/0/kernel", "block", False),
    ("block[0]", "block[0]", True),  # the name itself
    ("Blocks", "blocks", False),
]


@pytest.mark.parametrize(("name", "glob", "expected"), CASES)
def test_one_rule_everywhere(name: str, glob: str, expected: bool):
    assert matches(name, glob) is expected
    assert choose([glob])(name) is expected
    assert frozen_filter([glob, "other"], [name, "other", *([] if expected else [glob])])(name) is expected

    marks = [Mark(of, True, "model.py:7") for of in (name, "last")]
    stage = by_name({glob: 0, "*": 1})
    if expected:
        assert stage(marks, 2) == (0,)
    else:
        with pytest.raises(ValueError, match="matches no block"):
            stage(marks, 2)
