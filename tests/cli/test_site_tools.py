"""What ``resilio site install`` writes, as man, shells and module systems read it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from resilio_hpc.cli.site import site
from tests.support.environments import ROOT, scrubbed
from tests.support.requirements import need_program
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

ZSH = """
zmodload zsh/zpty
zpty z zsh -f -i
send() { zpty -w $2 z $1; sleep 0.3 }
wait_for() { local out; repeat 600 { zpty -r -t z out "*$1*" && return 0; sleep 0.1 }; print -u2 "no $1"; exit 1 }
send 'PS1="re""ady "; fpath=($1 $fpath); autoload -Uz compinit; compinit -u -D; bindkey "^I" complete-word'
wait_for ready
send $'resilio ckpt sh\\t' -n
wait_for show
send $' --tr\\t' -n
wait_for --tree
send $'\\x15resilio-launch --no-z\\t' -n
wait_for --no-zygote
zpty -d z
"""


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prefix whose bin has the command of this checkout."""
    where = tmp_path_factory.mktemp("site")
    (where / "bin").mkdir()
    (where / "bin" / "resilio").symlink_to(ROOT / ".venv" / "bin" / "resilio")
    assert site.main(["install", str(where)]) == 0
    return where


def said(*argv: str, expect: int = 0, **variables: str) -> str:
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=PATIENCE_S, env={**scrubbed("MAN", "MODULE"), **variables}
    )
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout + done.stderr


def pages(prefix: Path) -> list[str]:
    return sorted(map(str, (prefix / "share" / "man" / "man1").glob("*.1")))


def test_manual_pages_have_no_warning(prefix: Path) -> None:
    need_program("mandoc", package="mandoc")
    need_program("groff", package="groff")
    assert len(pages(prefix)) > 30
    assert said("mandoc", "-Tlint", "-Wwarning", *pages(prefix)) == ""
    for page in pages(prefix):
        assert said("groff", "-ww", "-man", "-Tutf8", "-z", page) == ""


def test_man_finds_a_page_beside_the_command(prefix: Path) -> None:
    need_program("man", package="man-db")
    path = f"{prefix}/bin:{os.environ['PATH']}"
    assert said("man", "-w", "resilio", "ckpt", PATH=path).splitlines()[0] == f"{prefix}/share/man/man1/resilio-ckpt.1"
    shown = said("man", "--warnings", "-P", "cat", "resilio-launch", PATH=path, MANWIDTH="80", LC_ALL="C.UTF-8")
    assert "--nproc-per-node" in shown and "troff" not in shown


def test_zsh_completes(prefix: Path, tmp_path: Path) -> None:
    need_program("zsh", package="zsh")
    (tmp_path / "test.zsh").write_text(ZSH.replace("$1 $fpath", f"'{prefix}/share/zsh/site-functions' $fpath"))
    assert said("zsh", "-f", str(tmp_path / "test.zsh")) == ""


def test_zsh_takes_the_printed_script() -> None:
    need_program("zsh", package="zsh")
    script = f'autoload -Uz compinit; compinit -u -D; eval "$({ROOT}/.venv/bin/resilio site completion zsh)"; '
    assert said("zsh", "-f", "-c", script + "print $+_comps[resilio] $+_comps[resilio-launch]") == "1 1\n"


def test_fish_completes(prefix: Path) -> None:
    need_program("fish", package="fish")
    found = {"XDG_DATA_DIRS": f"{prefix}/share:/usr/share", "PATH": f"{prefix}/bin:{os.environ['PATH']}"}
    ask = "complete -C 'resilio ckpt show --t'; complete -C 'resilio launch --mode o'; complete -C 'resilio undr'"
    answer = [line.split("\t")[0] for line in said("fish", "-c", ask, **found).splitlines()]
    assert answer == ["--tree", "observe", "undrain"]


LOAD = "module use '{0}/share/modulefiles' && module load resilio && resilio --version && command -v resilio"
UNLOAD = "module unload resilio; case $PATH in *'{0}'*) echo still there;; esac; module help resilio"


@pytest.mark.parametrize(
    ("init", "package"),
    [("/usr/share/lmod/lmod/init/bash", "lmod"), (".setup/environment-modules", "environment-modules")],
    ids=["lmod", "environment-modules"],
)
def test_the_module_loads_and_unloads(prefix: Path, init: str, package: str) -> None:
    if not (ROOT / init).exists():
        pytest.skip(f"needs {package} (scripts/system_packages.sh all, scripts/site_tools.sh)")
    start = f". {init}"
    if package != "lmod":
        (tcl,) = (ROOT / init / "usr" / "lib").glob("*/modulecmd.tcl")
        start = f'module() {{ eval "$(tclsh {tcl} bash "$@")"; }}; MODULEPATH='
    words = f"{start}; export MODULEPATH; " + f"{LOAD}; {UNLOAD}".replace("{0}", str(prefix))
    shown = said("bash", "-c", words)
    assert f"resilio 0.1.0\n{prefix}/bin/resilio\n" in shown and "still there" not in shown
    assert "See: man resilio" in shown
