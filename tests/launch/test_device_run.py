"""Under the real launcher: the state of a device that cannot be dumped, after the loss of its rank, or of itself.

Two nodes of two ranks each. Each rank's device holds another content, which decides the rank's batches; so the ends are
those of an undisturbed run only if each has its own again, as it was at the step that all go on from.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from device_recovery import DeviceRun, device_run
from resilio_hpc.core.ledger import read_ledger

STEPS, STRUCK = 10, 6


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> DeviceRun:
    return device_run(tmp_path_factory.mktemp("calm") / "run", 2, 2, "nothing", STEPS, STRUCK)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["rank", "device"])
def test_the_device_of_one_rank_is_rebuilt_by_its_log_and_all_go_on(what: str, calm: DeviceRun, tmp_path: Path) -> None:
    found = device_run(tmp_path / "run", 2, 2, what, STEPS, STRUCK)
    assert found.ends == calm.ends and len(found.ends) == 4
    restored = {line[0]: line for line in found.said("RESTORED")}
    assert {line[1] for line in restored.values()} == {str(STRUCK)}, "all go on from the last finished step"
    source, rebuilds = restored["1"][2:4]
    assert int(rebuilds) >= 1, "the log was done again"
    assert source == "log" or what == "device", "a rank that lives then goes back to the boundary on its new device"
    kept = [event.fields["kept"] for event in read_ledger(tmp_path / "run" / "run" / "ledger") if event.kind == "ranks"]
    assert sum(kept) == (3 if what == "rank" else 4)
    assert not [event for event in read_ledger(tmp_path / "run" / "run" / "ledger") if event.kind == "replicas_differ"]
