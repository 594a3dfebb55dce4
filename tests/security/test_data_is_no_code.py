"""What comes from a peer, a disk or a rank is data: nothing in the package runs it, and no shell is ever asked."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.support.environments import ROOT
from tests.support.sources import calls, parsed, walked

PACKAGE = ROOT / "resilio_hpc"
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
FORBIDDEN_CALLS = {"eval", "os.system", "os.popen", "torch.load", "yaml.load", "subprocess.getoutput", "numpy.load"}
BECOMING_SOMEBODY = {"os.setuid", "os.seteuid", "os.setreuid", "os.setresuid", "os.setgid", "os.setgroups"}
RUNS_THE_USERS_OWN_PROGRAM = {
    "launch/workers/forking/rank_main.py",
    "launch/workers/forking/forked_child.py",
    "launch/workers/forking/zygote.py",
}


READS_OTHERS_FORMATS = {  # torch.load there has weights_only (tests/test_layout.py), pickle finds no class or function
    "ckpt/dcp/values.py": {"torch.load"},  # what this very process has pickled
    "ckpt/convert/torch_file.py": {"torch.load"},
    "ckpt/convert/dcp_metadata.py": {"pickle"},
    "diagnose/hangs/flight_recorder.py": {"pickle"},
}


def sources() -> Iterator[tuple[str, ast.AST]]:
    found = sorted(path for folder in (PACKAGE, *PACKAGE.iterdir()) if folder.is_dir() for path in folder.rglob("*.py"))
    assert len(found) > 80
    for path in dict.fromkeys(found):
        name = path.relative_to(PACKAGE).as_posix()
        if "devcluster" not in name:  # a tool that plays a cluster, and says that it needs root
            yield name, parsed(path)


def test_nothing_is_unpickled_or_evaluated() -> None:
    for name, tree in sources():
        allowed = READS_OTHERS_FORMATS.get(name, set())
        for node in walked(tree):
            if isinstance(node, ast.Import):
                assert not (FORBIDDEN_MODULES - allowed) & {alias.name.split(".")[0] for alias in node.names}, name
            if isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] not in FORBIDDEN_MODULES, name
        called = {function for function, _ in calls(tree)}
        assert not called & (FORBIDDEN_CALLS - allowed), name
        assert "exec" not in called or name in RUNS_THE_USERS_OWN_PROGRAM, name


UNPICKLERS = {
    "ckpt/convert/dcp_metadata.py": {"pickle._Unpickler"},
    "diagnose/hangs/flight_recorder.py": {"pickle.Unpickler", "pickle.UnpicklingError"},
}


@pytest.mark.parametrize("name", UNPICKLERS)
def test_an_unpickler_looks_nothing_up(name: str) -> None:
    tree = parsed(PACKAGE / name)
    used = {ast.unparse(node) for node in walked(tree) if isinstance(node, ast.Attribute)}
    assert {word for word in used if word.startswith("pickle.")} == UNPICKLERS[name]
    assert any(isinstance(node, ast.FunctionDef) and node.name == "find_class" for node in walked(tree))
    assert not {"importlib.import_module", "__import__", "getattr"} & {function for function, _ in calls(tree)}


def test_no_shell_is_asked() -> None:
    for name, tree in sources():
        for function, call in calls(tree):
            shell = [word for word in call.keywords if word.arg == "shell"]
            assert not any(not isinstance(word.value, ast.Constant) or word.value.value for word in shell), (
                f"{name}: {function}"
            )


# The epilog is root's: what a user's job left is removed by a child that has become that user.
GIVES_UP_ROOT = {"prolog_epilog/hooks/process_cleanup.py"}


def test_nobody_becomes_somebody_else() -> None:
    """No part of the launcher is meant to run as root or to give a user root's rights."""
    for name, tree in sources():
        called = {function for function, _ in calls(tree)}
        assert not called & BECOMING_SOMEBODY or name in GIVES_UP_ROOT, name
        words = {node.value for node in walked(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        assert not words & {"sudo", "su", "setpriv", "pkexec", "doas"}, name
