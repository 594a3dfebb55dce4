"""Which scripts set variables that torch reads while it is loaded, before they import it."""

from __future__ import annotations

import zipapp
from collections.abc import Mapping
from pathlib import Path

import pytest

from resilio_hpc.launch.workers.forking.preload import own_places
from resilio_hpc.launch.workers.forking.script_scan import UNKNOWN, files_of_module, settings

ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
SETS = "import os\nos.environ['TORCH_LOGS'] = 'x'\n"
FOR_TYPES = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n  import torch\n"
TRIES = "import os\nif 1:\n  try:\n    os.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'x'\n  except E: ..."


def scan(folder: Path, source: str, modules: Mapping[str, str]) -> tuple[str, ...]:
    for name, text in {"train.py": source, **modules}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return settings([folder / "train.py"], [str(folder)], {"torch"}, ENVIRONMENT)


@pytest.mark.parametrize(
    ("source", "names"),
    [
        (SETS + "import torch", ("TORCH_LOGS",)),
        ("from os import environ\nenviron.setdefault('TORCH_LOGS', 'x')\nimport torch", ("TORCH_LOGS",)),
        ("import os\nos.putenv('KMP_AFFINITY', 'x')\nimport torch", ("KMP_AFFINITY",)),
        ("import os\nos.environ.update({'MKL_NUM_THREADS': '1'}, OMP_X='x')", ("MKL_NUM_THREADS", "OMP_X")),
        ("import os\nos.environ |= dict(TORCH_LOGS='x')\nimport torch", ("TORCH_LOGS",)),
        (TRIES, ("PYTORCH_CUDA_ALLOC_CONF",)),
        ("import os\nfor k, v in settings.items():\n  os.environ[k] = v\nimport torch", (UNKNOWN,)),
        ("from dotenv import load_dotenv\nload_dotenv()\nimport torch", (UNKNOWN,)),
        ("import os\ndef main():\n  os.environ['TORCH_LOGS'] = 'x'\n  import torch\nmain()", ("TORCH_LOGS",)),
        (FOR_TYPES + SETS, ("TORCH_LOGS",)),
        # what needs no new process
        ("import torch\n" + SETS, ()),
        ("from torch import nn\nimport os\ndef main():\n  os.environ[k] = v", ()),
        ("import os\nos.environ['OMP_NUM_THREADS'] = '1'\nimport torch", ()),  # as it is
        ("import os\nos.environ.setdefault('OMP_NUM_THREADS', '8')\nimport torch", ()),
        ("import os\nos.environ['MASTER_ADDR'] = os.environ['TORCH_NCCL_X'] = '1'\nimport torch", ()),
        ("import os\nprint(os.environ['TORCH_LOGS'], os.environ.get('OMP_X'))\nimport torch", ()),
        ("this is no Python", ()),
    ],
)
def test_what_stands_before_the_import_of_torch_counts(tmp_path: Path, source: str, names: tuple[str, ...]) -> None:
    assert scan(tmp_path, source, {}) == names


@pytest.mark.parametrize(
    ("source", "modules", "counts"),
    [
        ("import env\nimport torch", {"env.py": SETS}, True),
        ("from lib import env\nimport torch", {"lib/__init__.py": "", "lib/env.py": SETS}, True),
        ("import torch\nimport env", {"env.py": SETS}, False),
        ("import model\nimport env", {"model.py": "import torch", "env.py": SETS}, False),  # torch is loaded by then
        ("import a", {"a.py": "import b", "b.py": "import a\n" + SETS}, True),
    ],
)
def test_modules_beside_the_script_are_looked_at_as_they_are_imported(
    tmp_path: Path, source: str, modules: Mapping[str, str], counts: bool
) -> None:
    assert scan(tmp_path, source, modules) == (("TORCH_LOGS",) if counts else ())


def test_a_module_is_found_with_its_packages(tmp_path: Path) -> None:
    scan(
        tmp_path, "", {"tool/__init__.py": "from . import env", "tool/env.py": SETS, "tool/__main__.py": "import torch"}
    )
    places = [str(tmp_path)]
    assert settings(files_of_module("tool", places), places, {"torch"}, {}) == ("TORCH_LOGS",)


def test_an_archive_is_read_as_a_directory_is(tmp_path: Path) -> None:
    scan(tmp_path / "app", "", {"__main__.py": "import env\nimport torch", "env.py": SETS})
    archive = tmp_path / "app.pyz"
    zipapp.create_archive(tmp_path / "app", archive, interpreter="/usr/bin/env python3")
    assert settings([archive / "__main__.py"], [str(archive)], {"torch"}, {}) == ("TORCH_LOGS",)


def test_compiled_scripts_are_searched_for_the_word(tmp_path: Path) -> None:
    (tmp_path / "sets.pyc").write_bytes(b"...environ...")
    (tmp_path / "plain.pyc").write_bytes(b"...")
    assert settings([tmp_path / "sets.pyc"], [], {"torch"}, {}) == (UNKNOWN,)
    assert settings([tmp_path / "plain.pyc", tmp_path / "missing.pyc"], [], {"torch"}, {}) == ()


def test_libraries_that_a_sites_modules_put_on_the_path_are_not_the_users(tmp_path: Path) -> None:
    libraries = tmp_path / "numpy/lib/python3.11/site-packages"
    scan(libraries, "", {"numpy/__init__.py": "import os\nos.environ[key] = '1'"})
    scan(tmp_path / "mine", "import numpy\nimport torch", {})
    places = own_places(str(tmp_path / "mine"), f"{libraries}:{tmp_path / 'lib'}:")
    assert places == [str(tmp_path / "mine"), str(tmp_path / "lib")]
    assert settings([tmp_path / "mine/train.py"], places, {"torch"}, {}) == ()
