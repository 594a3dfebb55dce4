"""The demo's picture."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from resilio_hpc.cli import demo
from resilio_hpc.cli.demo import Screen
from resilio_hpc.devtools.picture import WIDTH


def test_a_picture_holds_every_line_and_loads_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen()
    screen.print("step 54: SIGKILL of a rank, on n3")
    screen.print("word " * WIDTH + "[bold]end[/bold]")
    screen.picture.save(tmp_path / "demo.svg", "resilio demo")
    picture = (tmp_path / "demo.svg").read_text()
    words = "".join(ElementTree.fromstring(picture).itertext()).replace("\xa0", " ")
    assert "resilio demo" in words
    assert "step 54: SIGKILL of a rank, on n3" in words
    assert words.count("word") == WIDTH
    assert re.findall(r"url\((?!#)", picture) == []
    assert "SIGKILL of a rank" in capsys.readouterr().out


def test_a_picture_that_could_not_be_kept_is_refused_before_the_demo_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main(["--picture", str(tmp_path / "gone" / "demo.svg")]) == 2
    assert "there is no directory" in capsys.readouterr().err
