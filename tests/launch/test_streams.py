"""torchrun's notation for standard streams."""

from __future__ import annotations

import pytest

from resilio_hpc.core.errors import UsageError
from resilio_hpc.launch.config.streams import Std, parse_std, std_of


@pytest.mark.parametrize("text", ["0", "1", "2", "3", "0:1", "0:3,1:0,2:1,3:2"])
def test_values_mean_what_torchrun_says(text: str) -> None:
    from torch.distributed.elastic.multiprocessing import Std as Theirs

    theirs, ours = Theirs.from_str(text), parse_std(text)
    if isinstance(theirs, dict):
        assert ours == {rank: int(value) for rank, value in theirs.items()}
    else:
        assert ours == int(theirs)


def test_local_ranks_above_nine_can_be_named() -> None:
    assert parse_std("10:3,11:1") == {10: Std.ALL, 11: Std.OUT}


@pytest.mark.parametrize("text", ["", "4", "-1", "0:4", "0:1,", "a:1", "0:1;1:2", " 3", "3\n"])
def test_anything_else_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="--tee"):
        parse_std(text, "--tee")


def test_a_rank_that_a_list_does_not_name_has_none() -> None:
    assert [std_of("0:1,2:3", rank) for rank in range(4)] == [Std.OUT, Std.NONE, Std.ALL, Std.NONE]
    assert std_of("2", 7) == Std.ERR
