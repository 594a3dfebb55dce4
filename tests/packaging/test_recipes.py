"""Recipes for Spack, EasyBuild and Apptainer ask for what setup.cfg asks for."""

from __future__ import annotations

import ast
import configparser
import re
from pathlib import Path

import pytest

import resilio_hpc
from tests.support.environments import ROOT

REPOSITORY = ROOT / "packaging" / "spack" / "spack_repo" / "resilio"
SPACK = REPOSITORY / "packages" / "py_resilio_hpc" / "package.py"
(EASYBUILD,) = (ROOT / "packaging" / "easybuild").glob("*.eb")
APPTAINER = ROOT / "packaging" / "apptainer" / "resilio.def"
# EasyBuild's name of what brings a package.
BRINGS = {"numpy": "SciPy-bundle", "rich": "Python-bundle-PyPI", "pyzmq": "PyZMQ"}
# Sums of others; pyslurm is built for the site's own Slurm; Spack has no py-spy.
NOT_IN_SPACK = {"all", "test", "pyslurm", "stacks"}


def setup() -> configparser.ConfigParser:
    read = configparser.ConfigParser()
    read.read(ROOT / "setup.cfg")
    return read


def requirements(text: str) -> dict[str, str]:
    """``numpy>=1.23`` → {"numpy": "1.23"}; without those of older Pythons than any recipe has."""
    found = [
        re.fullmatch(r"([\w-]+)>=([\d.]+)(; python_version.*)?", line) for line in text.split("\n") if line.strip()
    ]
    return {one[1].replace("_", "-"): one[2] for one in found if one}


NEEDED = requirements(setup()["options"]["install_requires"])
EXTRAS = {name: requirements(text) for name, text in setup()["options.extras_require"].items()}


def directives(name: str) -> list[tuple[str, dict[str, object]]]:
    """Each call of a directive in Spack's recipe: its first argument, and those with names."""
    calls = [node for node in ast.walk(ast.parse(SPACK.read_text())) if isinstance(node, ast.Call)]
    wanted = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == name and call.args]
    return [
        (ast.literal_eval(call.args[0]), {one.arg or "": ast.literal_eval(one.value) for one in call.keywords})
        for call in wanted
    ]


def test_spack_asks_for_the_same_packages() -> None:
    asked = {spec: options.get("when", "") for spec, options in directives("depends_on")}
    plain = {spec for spec, when in asked.items() if spec.startswith("py-") and "+" not in str(when)}
    assert plain - {"py-setuptools@77:"} == {f"py-{name}@{version}:" for name, version in NEEDED.items()}
    assert "setuptools>=77" in (ROOT / "pyproject.toml").read_text()
    assert f"python@{setup()['options']['python_requires'].removeprefix('>=')}:" in asked


def test_spack_has_a_variant_for_each_extra() -> None:
    assert {name for name, _ in directives("variant")} == set(EXTRAS) - NOT_IN_SPACK
    asked = {(spec, options.get("when", "")) for spec, options in directives("depends_on")}
    for extra in set(EXTRAS) - NOT_IN_SPACK:
        for name, version in EXTRAS[extra].items():
            assert (f"py-{name}@{version}:", f"+{extra}") in asked


def test_spacks_names_are_in_order() -> None:
    (parsed,) = [node for node in ast.walk(ast.parse(SPACK.read_text())) if isinstance(node, ast.ClassDef)]
    folder = SPACK.parent.name.replace("_", " ").title().replace(" ", "")
    assert (parsed.name, folder) == ("PyResilioHpc", "PyResilioHpc")
    assert directives("version")[0][0] == resilio_hpc.__version__


def easyconfig() -> dict[str, object]:
    """The file's values; only the names that EasyBuild itself defines are given."""
    values: dict[str, object] = {"SOURCE_PY3_WHL": "%(name)s-%(version)s-py3-none-any.whl"}
    exec(compile(EASYBUILD.read_text(), EASYBUILD.name, "exec"), values)
    return values


def test_easybuild_brings_the_same_packages() -> None:
    values = easyconfig()
    brought = {name for name, *_ in values["dependencies"]} | {name for name, *_ in values["exts_list"]}  # type: ignore[attr-defined]
    wanted = {BRINGS.get(name, name) for name in NEEDED if name != "tomli"}  # its Python has tomllib
    assert wanted - brought == set()
    assert EASYBUILD.name == f"resilio_hpc-{values['version']}-foss-2024a.eb"
    assert values["version"] == resilio_hpc.__version__


@pytest.mark.parametrize("place", ["%files", "%post", "%environment", "%test"])
def test_the_container_has_the_parts_that_its_template_needs(place: str) -> None:
    assert f"\n{place}\n" in APPTAINER.read_text()


def test_the_containers_extras_exist() -> None:
    (extras,) = re.findall(r"^    EXTRAS=(\S+)$", APPTAINER.read_text(), re.MULTILINE)
    assert set(extras.split(",")) <= set(EXTRAS)
    assert Path(APPTAINER).read_text().count("{{ ") == 4
