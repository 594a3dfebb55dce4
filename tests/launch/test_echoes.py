"""Tracebacks of echoes are kept off the console, and nothing else is: real files, a clock that the test moves."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilio_hpc.core.rank_error import write_error
from resilio_hpc.launch.config.options import LaunchOptions
from resilio_hpc.launch.config.output_options import OutputOptions
from resilio_hpc.launch.protocol.messages import Cause
from resilio_hpc.launch.protocol.root_cause import place_of
from resilio_hpc.launch.workers.output.console import Console, RankLogs
from resilio_hpc.launch.workers.output.echoes import HOLD_S, MOST_BYTES

KILLED = Cause("n1", 0)
RESET = "Connection reset by peer"


class Ranks:
    """The logs and error files of four ranks, their console, and the file in place of the terminal."""

    def __init__(self, directory: Path, **changes: object) -> None:
        self.directory = directory
        self.now = 100.0
        self._shown = directory / "console"
        self._file = self._shown.open("ab", buffering=0)
        launch = LaunchOptions(script="x.py", kind="script", run_dir="/tmp", **changes)  # type: ignore[arg-type]
        self.console = Console(launch, self._file.fileno(), self._file.fileno(), clock=lambda: self.now)
        self.round = -1
        self.next_round()

    def next_round(self) -> None:
        self.round += 1
        logs = [
            RankLogs(rank, rank, self.log(rank), self.log(rank), self.directory / f"{self.round}.{rank}.json")
            for rank in range(4)
        ]
        self.console.watch(logs, 4, self.directory)

    def log(self, rank: int) -> Path:
        return self.directory / f"{self.round}.{rank}.log"

    def write(self, rank: int, text: str) -> None:
        with self.log(rank).open("a") as file:
            file.write(text)

    def error(self, rank: int, error: Exception) -> str:
        """Record an error as a rank does, and return its traceback, which is not printed yet."""
        write_error(self.directory / f"{self.round}.{rank}.json", error)
        return "".join(traceback.format_exception(error))

    def shown(self) -> str:
        while self.console.poll():
            continue
        return self._shown.read_text()

    def close(self) -> None:
        self.console.close()
        self._file.close()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    made = Ranks(tmp_path)
    yield made
    made.close()


def raised(error: Exception) -> Exception:
    def collective() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        collective()
    return caught.value


def lines(rank: int, text: str) -> str:
    return "".join(f"[rank {rank}] {line}\n" for line in text.splitlines())


def test_an_echo_waits_for_the_cause_and_is_dropped(ranks: Ranks) -> None:
    ranks.write(1, "step 7\n")
    ranks.write(1, ranks.error(1, raised(ConnectionError(RESET))))
    ranks.write(1, "last words\n")
    assert ranks.shown() == "[rank 1] step 7\n"
    ranks.console.judge(KILLED)
    assert ranks.shown() == "[rank 1] step 7\n[rank 1] last words\n"


def test_what_torch_writes_before_each_line_makes_no_difference(ranks: Ranks) -> None:
    text = ranks.error(1, raised(RuntimeError(f"Read error: {RESET}.\nLook at the other rank.")))
    ranks.write(1, "".join(f"[rank1]: {line}\n" for line in text.splitlines()))
    assert ranks.shown() == ""
    ranks.console.judge(KILLED)
    assert ranks.shown() == ""


def test_a_chain_of_exceptions_is_one_echo(ranks: Ranks) -> None:
    try:
        try:
            raise ConnectionResetError(104, RESET)
        except OSError as error:
            raise RuntimeError(f"all_reduce: {RESET}") from error
    except RuntimeError as error:
        ranks.write(1, ranks.error(1, error))
    assert ranks.shown() == ""
    ranks.console.judge(KILLED)
    assert ranks.shown() == ""


def test_frames_before_those_of_a_scripts_own_record_belong_to_the_traceback(ranks: Ranks) -> None:
    text = ranks.error(1, raised(ConnectionError(RESET)))
    head, rest = text.split("\n", 1)
    ranks.write(1, f'{head}\n  File "train.py", line 99, in <module>\n    main()\n{rest}')
    assert ranks.shown() == ""
    ranks.console.judge(KILLED)
    assert ranks.shown() == ""


@pytest.mark.parametrize("cause", [None, Cause("n1", 1), Cause("n1", 0, True, "elsewhere.py:1")])
def test_no_cause_or_the_cause_itself_or_another_place_is_shown(ranks: Ranks, cause: Cause | None) -> None:
    text = ranks.error(1, raised(ConnectionError(RESET)))
    ranks.write(1, text + "after\n")
    assert ranks.shown() == ""
    ranks.console.judge(cause)
    assert ranks.shown() == lines(1, text) + "[rank 1] after\n"


def test_of_ranks_that_timed_out_in_one_place_one_is_shown(ranks: Ranks) -> None:
    text = ranks.error(1, raised(TimeoutError("Timed out waiting 5000ms")))
    ranks.write(1, text)
    ranks.write(2, ranks.error(2, raised(TimeoutError("Timed out waiting 5000ms"))))
    ranks.console.judge(Cause("n1", 1, True, place_of(text)))
    assert ranks.shown() == lines(1, text)


def test_an_error_of_its_own_is_shown_at_once(ranks: Ranks) -> None:
    text = ranks.error(1, raised(ValueError("shard 1 is empty")))
    ranks.write(1, text)
    assert ranks.shown() == lines(1, text)
    ranks.console.judge(KILLED)
    text = ranks.error(2, raised(ValueError("shard 2 is empty")))
    ranks.write(2, text)
    assert ranks.shown().endswith(lines(2, text))


def test_an_error_that_the_script_caught_is_shown_at_once(ranks: Ranks) -> None:
    text = "".join(traceback.format_exception(raised(ConnectionError(RESET))))
    ranks.write(1, text)
    assert ranks.shown() == lines(1, text)


def test_text_that_is_not_the_recorded_traceback_is_shown_at_once(ranks: Ranks) -> None:
    text = ranks.error(1, raised(ConnectionError(RESET)))
    some = "\n".join(text.splitlines()[:2])
    ranks.write(1, some + "\nfrom another thread\n")
    assert ranks.shown() == lines(1, some) + "[rank 1] from another thread\n"


def test_an_echo_that_no_word_explains_is_shown_after_a_while(ranks: Ranks) -> None:
    text = ranks.error(1, raised(ConnectionError(RESET)))
    ranks.write(1, text)
    assert ranks.shown() == ""
    ranks.now += HOLD_S / 2
    assert ranks.shown() == ""
    ranks.now += HOLD_S
    assert ranks.shown() == lines(1, text)


def test_much_text_after_an_echo_does_not_wait(ranks: Ranks) -> None:
    text = ranks.error(1, raised(ConnectionError(RESET)))
    more = ("x" * 1000 + "\n") * (MOST_BYTES // 1000 + 1)
    ranks.write(1, text + more)
    assert ranks.shown() == lines(1, text + more)


def test_an_echo_is_known_when_it_comes_after_the_word(ranks: Ranks) -> None:
    ranks.console.judge(KILLED)
    ranks.write(1, ranks.error(1, raised(ConnectionError(RESET))) + "after\n")
    assert ranks.shown() == "[rank 1] after\n"


def test_half_an_echo_of_a_killed_rank_is_dropped_too(ranks: Ranks) -> None:
    text = ranks.error(1, raised(ConnectionError(RESET)))
    ranks.write(1, text[: len(text) // 2])
    ranks.console.judge(KILLED)
    ranks.next_round()
    ranks.write(1, "again\n")
    assert ranks.shown() == "[rank 1] again\n"


def test_the_word_holds_for_the_rounds_so_far(ranks: Ranks) -> None:
    ranks.console.judge(KILLED)
    ranks.next_round()
    text = ranks.error(1, raised(ConnectionError(RESET)))
    ranks.write(1, text)
    assert ranks.shown() == ""
    ranks.console.judge(None)
    assert ranks.shown() == lines(1, text)


def test_at_the_end_nothing_is_kept_back_without_a_word(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    text = ranks.error(1, raised(ConnectionError(RESET)))
    ranks.write(1, text)
    ranks.close()
    assert (tmp_path / "console").read_text() == lines(1, text)


@pytest.mark.parametrize(
    "changes",
    [
        {"echoes": "show"},
        {"output": OutputOptions(tee="3")},
        {"output": OutputOptions(tee="1:2")},
        {"output": OutputOptions(local_ranks_filter=(1,))},
    ],
)
def test_the_user_may_see_everything(tmp_path: Path, changes: dict[str, object]) -> None:
    ranks = Ranks(tmp_path, **changes)
    text = ranks.error(1, raised(ConnectionError(RESET)))
    ranks.write(1, text)
    assert ranks.shown().count("Traceback") == 1
    ranks.close()


def test_filtered_files_have_the_lines_of_echoes(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, output=OutputOptions(duplicate_stdout_filters=("Traceback",)))
    ranks.write(1, ranks.error(1, raised(ConnectionError(RESET))))
    ranks.console.judge(KILLED)
    assert ranks.shown() == ""
    assert (tmp_path / "filtered_stdout.log").read_text().count("Traceback") == 1
    ranks.close()


@pytest.mark.parametrize(
    ("traceback_text", "place"),
    [
        ("", ""),
        ('  File "/home/me/train.py", line 88, in main\n', "train.py:88"),
        (
            '  File "/home/me/train.py", line 88, in main\n    x\n'
            '  File "/env/lib/python3.11/site-packages/torch/distributed/c10d.py", line 7, in all_reduce\n',
            "train.py:88",
        ),
        ('  File "/env/lib/python3.11/runpy.py", line 5, in x\n', "runpy.py:5"),
        ('  |   File "/home/me/groups.py", line 3, in y\n', "groups.py:3"),
        ('  File "no line"\n', ""),
    ],
)
def test_the_place_is_the_programs_own_line(traceback_text: str, place: str) -> None:
    assert place_of(traceback_text) == place
