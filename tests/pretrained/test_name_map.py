"""A map of names: which tensor is for which leaf, and what is wrong with a map, leaf by leaf."""

from __future__ import annotations

import dataclasses

import pytest

from jaxpp_flax.pretrained import IDENTITY, NameMap, Rule


def faults(names: NameMap, **shapes: tuple[int, ...]) -> list[str]:
    return names.resolve({name.replace("__", "/"): shape for name, shape in shapes.items()})[1]


def test_a_leaf_without_a_rule_with_two_and_with_one_for_other_dimensions():
    names = NameMap((Rule("a/*", "a.*"), Rule("*/kernel", "b.*"), Rule("c", "c", transpose=(1, 0))))
    assert faults(names, a__kernel=(2,), d=(2,), c=(2,)) == [
        "a/kernel: filled twice, by (a/* <- a.*) and (*/kernel <- b.*). Keep one, or let the '*' of one match less",
        "d: no rule of the map fills it. Add a Rule for it, or name it in keep=",
        "c: has shape (2,), and its rule is for another number of dimensions: c <- c, transpose (1, 0). Change the "
        "rule's transpose= and merge=, or add one for this leaf",
    ]


def test_a_stack_has_its_layers_in_the_order_of_its_parts():
    names = NameMap((Rule("layers/*/kernel", "h.#.w", transpose=(1, 0), stack=0),))
    shapes = {f"layers/stage_{i}/kernel": (2 if i else 1, 4, 3) for i in (10, 2, 0)}
    fills, wrong = names.resolve(shapes)
    assert not wrong
    assert {fill.leaf: fill.tensors for fill in fills} == {
        "layers/stage_0/kernel": ("h.0.w",),
        "layers/stage_2/kernel": ("h.1.w", "h.2.w"),
        "layers/stage_10/kernel": ("h.3.w", "h.4.w"),
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"leaf": "a", "tensor": "h.#.w"}, r"stack=None\): stack= and a '#' in the tensor's name"),
        ({"leaf": "a", "tensor": "h.w", "stack": 0}, "belong together"),
        ({"leaf": "a/*", "tensor": "h.w"}, r"the tensor's name needs 1 '\*', as many as the leaf's path"),
        ({"leaf": "a", "tensor": "b", "transpose": (0, 2)}, r"transpose=\(0, 2\) is no permutation"),
        ({"leaf": "a", "tensor": "b", "transpose": (1, 0), "merge": (2, 1)}, r"merge=\(2, 1\) does not sum up to"),
    ],
)
def test_a_rule_that_cannot_be_meant(arguments: dict, message: str):
    with pytest.raises(ValueError, match=message):
        Rule(**arguments)


def test_a_map_prints_all_it_says_and_is_data():
    names = NameMap((Rule("a/*", "b.*", merge=(2,)),), prefix="x.", ignore=("*.mask",), ties={"h": "e"})
    assert str(names) == "a/* <- b.*, merge (2,)\nprefix x.\nignored: *.mask\ntie: h = e"
    assert dataclasses.replace(names) == names
    assert str(IDENTITY) == "* <- *"
