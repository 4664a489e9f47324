"""Each error class has a code of its own, which its traceback names, and an entry in the error index."""

from __future__ import annotations

import importlib
import pickle
import re
import traceback
import warnings
from pathlib import Path

import pytest

from jaxpp_flax.checkpoint.errors import CheckpointMismatchError, CheckpointNotFoundError, CorruptCheckpointError
from jaxpp_flax.error_codes import code_of
from jaxpp_flax.trainers.errors import BatchError, BatchStatisticsWarning

ROOT = Path(__file__).parents[1]
INDEX = (ROOT / "docs" / "troubleshooting" / "errors.md").read_text()


def classes() -> list[type[Exception]]:
    found: list[type[Exception]] = []
    for path in sorted((ROOT / "jaxpp_flax").rglob("*.py")):
        for name in re.findall(r"^class (\w+(?:Error|Warning|Exception))\b", path.read_text(), flags=re.MULTILINE):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found.append(getattr(importlib.import_module(module), name))
    return found


def test_each_class_has_a_code_and_an_entry():
    entries = re.findall(r"^\((jpf\d+)\)=\n### (JPF\d+) (\w+)$", INDEX, flags=re.MULTILINE)
    assert all(anchor == code.lower() for anchor, code, _ in entries)
    listed = [(code, name) for _, code, name in entries]
    assert sorted(listed) == sorted((vars(cls).get("_code"), cls.__name__) for cls in classes())
    assert len({code for code, _ in listed}) == len(listed)


def test_the_traceback_ends_with_the_code_and_the_message_stays_as_it_is():
    error = BatchError("7 rows")
    assert str(error) == "7 rows"
    last = traceback.format_exception(error)[-1]
    address = r"https://\S+/troubleshooting/errors\.html#jpf201"
    assert re.fullmatch(rf"JPF201: `python -m jaxpp_flax explain JPF201`, or {address}\n", last)


def test_an_error_of_several_documented_classes_is_noted_once_and_stays_an_os_error():
    error = CorruptCheckpointError("a file is cut off")
    assert error.__notes__ == [f"JPF403: {error.__notes__[0].partition(' ')[2]}"]
    assert (error.args, error.errno) == (("a file is cut off",), None)
    assert CheckpointNotFoundError(2, "gone", "/ckpt").filename == "/ckpt"


def test_a_copy_has_one_note():
    error = CheckpointMismatchError("ckpt does not fit.", ["a: missing"])
    copied = pickle.loads(pickle.dumps(error))
    assert (str(copied), copied.__notes__) == (str(error), error.__notes__)


def test_a_subclass_of_a_user_keeps_the_code():
    class MyError(BatchError):
        pass

    assert code_of(MyError) == "JPF201"
    assert len(MyError("x").__notes__) == 1
    assert code_of(ValueError) == ""


def test_a_warning_has_its_code_in_the_line():
    with pytest.warns(BatchStatisticsWarning, match=r"one microbatch \[JPF901\]$"):
        warnings.warn("statistics of one microbatch", BatchStatisticsWarning, stacklevel=1)
