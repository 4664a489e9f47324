"""A user's own schedule, from lists and from CSV files."""

import pytest

from jaxpp_flax.schedules import (
    CustomSchedule,
    ScheduleError,
    Std1F1B,
    by_name,
    names,
    normalize,
    read_csv,
    validate,
    write_csv,
)
from jaxpp_flax.schedules.task import backward, backward_input, backward_weight, forward, fused


@pytest.mark.parametrize("microbatches", [1, 3, 4])
@pytest.mark.parametrize("name", names())
def test_csv_round_trip(tmp_path, name, microbatches):
    schedule = by_name(name, 4, 2 if name in names(4, 2) else 4)
    file = tmp_path / "schedule.csv"
    write_csv(schedule, file, microbatches)
    again = read_csv(file)
    # One microbatch's forward and backward always stand together on the last stage.
    assert again.tasks(microbatches) == normalize(schedule.tasks(microbatches))
    assert [again.rank_of(s) for s in range(4)] == [schedule.rank_of(s) for s in range(4)]
    assert again.splits_backward == schedule.splits_backward


def test_csv_has_a_column_for_each_step(tmp_path):
    file = tmp_path / "schedule.csv"
    write_csv(Std1F1B(2), file, 2)
    assert file.read_text() == "0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1,\n"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("0F0,0B0,0X1\n", r"row 1, column 3: '0X1' is not a task"),
        ("0F0,0SEND_F0,0B0\n", "leave out sends and receives"),
        ("0F0,0B0\n1B0,1F0\n", ">1B0<"),
        ("0F0,0B0\n0F1,0B1\n", "stage 0 belongs to rank 0"),
        ("0F0,0B0\n,1F0,1B0\n,2F0\n", "missing: 2B0"),
        ("\n\n", "at least one task"),
    ],
)
def test_a_faulty_file_is_refused(tmp_path, text, fault):
    file = tmp_path / "schedule.csv"
    file.write_text(text)
    with pytest.raises(ScheduleError, match=fault):
        read_csv(file)


def test_normal_form():
    overlapped = [
        [forward(0, 0), backward_input(0, 0), backward_weight(0, 0)],
        [forward(1, 0), None, backward(1, 0)],
        [forward(2, 0), backward_input(2, 0), backward_weight(2, 0)],
    ]
    assert normalize(overlapped) == [
        [forward(0, 0), backward(0, 0)],
        [forward(1, 0), backward_input(1, 0), backward_weight(1, 0)],
        [forward(2, 0), backward_input(2, 0), backward_weight(2, 0)],
    ]
    half_fused = [[fused(0, 0), forward(0, 1), forward(0, 2), backward(0, 1), backward(0, 2)]]
    assert normalize(half_fused)[0][:2] == [forward(0, 0), backward(0, 0)]
    with pytest.raises(ScheduleError, match="Fuse all or none"):
        validate(half_fused, 3)
    with pytest.raises(ScheduleError, match="stage 0 has no split backward"):
        validate([[forward(0, 0), backward_input(0, 0), backward_weight(0, 0)]], 1)


def test_overlapped_cells_are_read_in_order(tmp_path):
    file = tmp_path / "schedule.csv"
    file.write_text("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n")
    assert read_csv(file).tasks(2) == [[forward(0, 0), forward(0, 1), backward(0, 0), backward(0, 1)]]


def test_a_list_serves_one_number_of_microbatches():
    mine = CustomSchedule(Std1F1B(2).tasks(3))
    with pytest.raises(ScheduleError, match=r"written for 3 microbatches, got 5. Use num_microbatches=3"):
        mine.tasks(5)
    assert mine == CustomSchedule(Std1F1B(2).tasks(3)) != CustomSchedule(Std1F1B(2).tasks(2))


def test_mixed_backwards_are_refused():
    mixed = [
        [forward(0, m) for m in (0, 1)] + [backward(0, m) for m in (0, 1)],
        [forward(1, 0), backward(1, 0), forward(1, 1), backward_input(1, 1), backward_weight(1, 1)],
    ]
    with pytest.raises(ScheduleError, match=r"missing: 1I0, 1W0.*split"):
        validate(mixed, 2)
    validate(normalize(mixed), 2)
