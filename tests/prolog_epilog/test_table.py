"""A site changes checks in its own file; what it spells wrongly is said, with what it may have meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from resilio_hpc.core.errors import UsageError
from resilio_hpc.prolog_epilog.base.table import load


def site(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "health.toml"
    path.write_text(text)
    return path


def test_a_site_changes_what_it_names_and_nothing_else(tmp_path: Path) -> None:
    text = """
[disk-space]
on_fail = "warn"
limits.free_percent = 10
[gpu-nvlink]
enabled = false
[settings.file-systems]
paths = ["/", "/local"]
"""
    before, after = load(site=Path("/dev/null")), load(site=site(tmp_path, text))
    changed = [name for name, check in after.checks.items() if check != before.checks[name]]
    assert changed == ["gpu-nvlink", "disk-space"]
    assert after.checks["disk-space"].limits == {"free_percent": 10, "free_mib": 64, "network_free_percent": 0}
    assert after.settings["file-systems"].texts("paths") == ["/", "/local"]
    assert after.settings["file-systems"].texts("write") == before.settings["file-systems"].texts("write")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[disk-spice]\nenabled = false", "'disk-spice': did you mean disk-space?"),
        ("[disk-space]\nonfail = 'warn'", "'onfail' cannot be set: did you mean on_fail?"),
        ("[disk-space]\non_fail = 'explode'", "Invalid enum value 'explode'"),
        ("[disk-space]\nlimits.free = 3", "no limit is named 'free': did you mean free_mib"),
        ("[disk-space]\nlimits.free_percent = '3'", "free_percent = '3': give a number, as in 2"),
        ("[disk-space]\nlimits.free_percent = nan", "give a number"),
        ("[disk-space]\nlimits.free_percent = true", "give a number"),
        ("[disk-space]\nbudget_s = 0", "budget_s = 0: give more than 0"),
        ("[disk-space]\nbudget_s = 1e9", "at most 120"),
        ("[disk-space]\nevery_s = 0.1", "every_s = 0.1: give 1 to 86400"),
        ("[disk-space]\nlimits = 3", "give a table"),
        ("disk-space = 3", "give a table"),
        ("[settings.file-system]\npaths = []", "did you mean file-systems?"),
        ("[settings.file-systems]\npaths = 'all'", "paths = 'all': give a list of texts"),
        ("[disk-space]\nid = 'mine'", "'id' cannot be set"),
        ("disk-space]", "is no TOML"),
    ],
)
def test_what_a_site_spells_wrongly_is_said(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UsageError) as raised:
        load(site=site(tmp_path, text))
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read .*/none\.toml"):
        load(site=tmp_path / "none.toml")


def test_every_row_says_where_it_is_from_and_what_it_means() -> None:
    for check in load(site=Path("/dev/null")).checks.values():
        assert check.origin and check.summary and check.reason and check.contexts, check.id
