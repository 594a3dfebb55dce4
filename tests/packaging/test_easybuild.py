"""EasyBuild itself resolves the file's dependencies, and builds it.

Building the toolchain takes hours, so the build has this environment's Python and packages in place of those that the
file asks for.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.checkout import copy_of_checkout
from tests.support.environments import ROOT, scrubbed
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.slow
EB = ROOT / ".venv-easybuild" / "bin" / "eb"
LMOD = Path("/usr/share/lmod/lmod/libexec/lmod")
(FILE,) = (ROOT / "packaging" / "easybuild").glob("*.eb")
PATIENCE_OF_A_BUILD_S = 900.0


def eb(*words: str, **variables: str) -> str:
    if not EB.exists() or not LMOD.exists():
        pytest.skip("needs EasyBuild and lmod (scripts/system_packages.sh all, scripts/site_tools.sh)")
    given = {"PATH": f"{EB.parent}:{os.environ['PATH']}", "EB_PYTHON": str(EB.with_name("python")), **variables}
    done = subprocess.run(
        [str(EB), "--allow-use-as-root-and-accept-consequences", "--modules-tool=Lmod", *words],
        env={**scrubbed("EASYBUILD", "MODULE", "PYTHON"), "LMOD_CMD": str(LMOD), **given},
        capture_output=True, text=True, timeout=PATIENCE_OF_A_BUILD_S,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


def test_easybuild_knows_every_dependency(tmp_path: Path) -> None:
    said = eb(f"--prefix={tmp_path}", "--dry-run", "--robot", str(FILE))
    assert "(module: resilio_hpc/0.1.0-foss-2024a)" in said and "(module: h5py/3.12.1-foss-2024a)" in said
    assert "All style checks PASSed" in eb(f"--prefix={tmp_path}", "--check-style", str(FILE))


def sources(where: Path) -> None:
    """What the build unpacks: this checkout's sdist, and what its file gets from a registry."""
    copy = copy_of_checkout(where / "checkout")
    steps = [[sys.executable, "setup.py", "-q", "sdist", "-d", str(where)]]
    for name, version in re.findall(r"^    \('(\w+)', '([\d.]+)'", FILE.read_text().partition("exts_list")[2], re.M):
        form = "--only-binary=:all:" if name == "shtab" else "--no-binary=:all:"
        steps.append(
            [sys.executable, "-m", "pip", "download", "-q", "--no-deps", form, "-d", str(where), f"{name}=={version}"]
        )
    for argv in steps:
        done = subprocess.run(argv, cwd=copy, capture_output=True, text=True, timeout=PATIENCE_S)
        if done.returncode != 0 and "pip" in argv:
            pytest.skip(f"cannot be had here: {argv[-1]}")
        assert done.returncode == 0, done.stderr


def test_easybuild_builds_and_checks_it(tmp_path: Path) -> None:
    here, version = Path(sys.prefix), platform.python_version()
    (tmp_path / "modules" / "Python").mkdir(parents=True)
    (tmp_path / "modules" / "Python" / version).write_text(
        f"#%Module\nprepend-path PATH {here}/bin\nsetenv EBROOTPYTHON {here}\nsetenv EBVERSIONPYTHON {version}\n"
    )
    (tmp_path / "known.cfg").write_text(f"[Python/{version}]\nname = Python\nversion = {version}\nprefix = {here}\n")
    (tmp_path / "sources").mkdir()
    text = re.sub(
        r"dependencies = \[.*?\n\]", f"dependencies = [('Python/{version}', EXTERNAL_MODULE)]", FILE.read_text(),
        flags=re.DOTALL,
    )  # fmt: skip
    file = tmp_path / "resilio_hpc-0.1.0.eb"
    file.write_text(text.replace("{'name': 'foss', 'version': '2024a'}", "SYSTEM"))
    if not EB.exists() or not LMOD.exists():
        pytest.skip("needs EasyBuild and lmod (scripts/system_packages.sh all, scripts/site_tools.sh)")
    sources(tmp_path / "sources")
    said = eb(
        f"--prefix={tmp_path}", f"--sourcepath={tmp_path}/sources", "--disable-rpath",
        f"--external-modules-metadata={tmp_path}/known.cfg", str(file), MODULEPATH=str(tmp_path / "modules"),
    )  # fmt: skip
    assert "Build succeeded for 1 out of 1" in said
    built = tmp_path / "software" / "resilio_hpc" / "0.1.0"
    assert list(built.glob("lib/python*/site-packages/resilio_hpc/native/intercept/*.so"))
    assert (built / "share" / "bash-completion" / "completions" / "resilio").exists()
