"""The house rules that a machine can hold: floors, forbidden habits, sizes, names, links."""

import ast
import importlib
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.environments import ROOT
from tests.support.sources import calls, parsed, walked

GROUND = {"core"}
MIDDLE = GROUND | {"slurm", "native", "events"}
UPPER = MIDDLE | {"autoparallel", "ckpt", "prolog_epilog"}
# What each room may import. Rooms of one floor do not import each other; the commands (cli) may use all.
FLOORS: dict[str, set[str]] = {
    "core": set(),
    "native": GROUND,
    "events": GROUND,
    "slurm": GROUND,
    "autoparallel": MIDDLE,
    "ckpt": MIDDLE,
    "prolog_epilog": MIDDLE,
    "diagnose": UPPER,
    "watch": GROUND,
    "metrics": UPPER | {"diagnose"},
    "launch": UPPER | {"diagnose", "watch", "metrics"},
    "train": UPPER | {"diagnose"},
    "frameworks": UPPER | {"train"},
    "report": UPPER | {"diagnose"},
    "devtools": UPPER | {"train", "report"},
    "drills": UPPER | {"launch", "train", "report", "devtools"},
    "simulate": UPPER | {"diagnose", "launch", "report"},
    "doctor": UPPER | {"launch", "train"},
    "alerts": UPPER | {"metrics", "launch", "report"},
    "cli": UPPER
    | {"diagnose", "metrics", "watch", "launch", "train", "report"}
    | {"devtools", "doctor", "simulate", "alerts", "drills"},
}
TOP_LEVEL_ROOMS = ("autoparallel", "core", "native", "slurm", "ckpt", "prolog_epilog")
# torch.distributed.checkpoint hands values over as pickles, within a process; this module makes and reads them.
UNSAFE_FORMATS = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
FOREIGN_FORMATS = {  # what others write and read is made and read here, each by its own means
    "ckpt/dcp/values.py": {"torch.load", "torch.save"},  # within this process only
    "ckpt/convert/dcp_folder.py": {"torch.save"},
    "ckpt/convert/dcp_metadata.py": {"pickle"},
    "ckpt/convert/torch_file.py": {"torch.load", "torch.save"},
    "ckpt/convert/torch_state.py": {"torch.save"},
    "resilio_hpc/diagnose/hangs/flight_recorder.py": {"pickle"},
}
MAX_LINES = 300  # of a module of the product
MAX_TEST_LINES = 400
FORBIDDEN_NAMES = {"utils.py", "helpers.py", "common.py", "misc.py"}


def python_files(*folders: str) -> list[Path]:
    """Python files below these top-level folders, each once: the links inside the package are not followed."""
    found = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return sorted(path for path in found if "__pycache__" not in path.parts)


PACKAGE_FILES = python_files("resilio_hpc", *TOP_LEVEL_ROOMS)
ALL_FILES = [*PACKAGE_FILES, *python_files("tests", "benchmarks", "examples")]


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def room_of(path: Path) -> str | None:
    """The room of a module; None for the roof's own __init__."""
    parts = path.relative_to(ROOT).parts
    if parts[0] != "resilio_hpc":
        return parts[0]
    return parts[1] if len(parts) > 2 else None


def imported_modules(tree: ast.AST) -> Iterator[str]:
    """Absolute names of everything imported, also inside functions; `from a import b` gives a.b."""
    for node in walked(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def floors_broken(tree: ast.AST, room: str) -> list[str]:
    """Imports that go up, or sideways, from this room."""
    allowed = FLOORS[room] | {room}
    ours = [name.split(".") for name in imported_modules(tree) if name.startswith("resilio_hpc.")]
    return [".".join(parts) for parts in ours if parts[1] in FLOORS and parts[1] not in allowed]


def bare_imports(tree: ast.AST) -> list[str]:
    """`import ckpt`: the same code would be loaded twice under two names."""
    return [name for name in imported_modules(tree) if name.split(".")[0] in TOP_LEVEL_ROOMS]


def unsafe_formats(tree: ast.AST) -> list[str]:
    """Formats whose reading can run code, torch.save and torch.load included."""
    imports = [name for name in imported_modules(tree) if name.split(".")[0] in UNSAFE_FORMATS]
    return imports + [call for call, _ in calls(tree) if call in {"torch.save", "torch.load"}]


def unguarded_loads(tree: ast.AST) -> list[str]:
    """torch.load that may run code."""
    loads = [node for call, node in calls(tree) if call == "torch.load"]
    return [ast.unparse(node) for node in loads if "weights_only=True" not in map(ast.unparse, node.keywords)]


def shells(tree: ast.AST) -> list[str]:
    """Commands handed to a shell."""
    found = [call for call, _ in calls(tree) if call in {"os.system", "os.popen", "subprocess.getoutput"}]
    keywords = [node for node in walked(tree) if isinstance(node, ast.keyword) and node.arg == "shell"]
    return found + [f"shell={ast.unparse(node.value)}" for node in keywords if ast.unparse(node.value) != "False"]


def swallowed_errors(tree: ast.AST) -> list[str]:
    """`except Exception: pass` and its like."""
    handlers = [node for node in walked(tree) if isinstance(node, ast.ExceptHandler)]
    broad = [h for h in handlers if h.type is None or ast.unparse(h.type) in {"Exception", "BaseException"}]
    silent = (ast.Pass, ast.Continue)
    return [f"line {h.lineno}" for h in broad if all(isinstance(statement, silent) for statement in h.body)]


HABITS: dict[str, Callable[[ast.AST], list[str]]] = {
    "bare import": bare_imports,
    "unguarded load": unguarded_loads,
    "shell": shells,
    "swallowed error": swallowed_errors,
}
SAMPLES = {
    "bare import": ["import ckpt", "from slurm.model import Node", "def f():\n    import core.errors"],
    "unguarded load": ["torch.load(path)", "torch.load(path, weights_only=some)"],
    "shell": ["run('ls', shell=True)", "os.system('ls')"],
    "swallowed error": ["try:\n    f()\nexcept Exception:\n    pass", "try:\n    f()\nexcept:\n    pass"],
}


def findings(files: list[Path], rule: Callable[[ast.AST], list[str]]) -> dict[str, list[str]]:
    """What a rule finds, by file."""
    found = {relative(path): rule(parsed(path)) for path in files}
    return {path: what for path, what in found.items() if what}


def test_every_room_has_its_place_on_a_floor() -> None:
    assert {room_of(path) for path in PACKAGE_FILES} - {None} == set(FLOORS)


@pytest.mark.parametrize("room", FLOORS)
def test_imports_go_down_the_floors(room: str) -> None:
    files = [path for path in PACKAGE_FILES if room_of(path) == room]
    assert files
    assert findings(files, lambda tree: floors_broken(tree, room)) == {}


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("core", "from resilio_hpc.native import engine"),
        ("slurm", "import resilio_hpc.ckpt.snapshot.arena"),
        ("ckpt", "from resilio_hpc import launch"),
        ("train", "from resilio_hpc.launch.agent.agent import run"),
    ],
)
def test_an_import_that_goes_up_is_seen(room: str, source: str) -> None:
    assert floors_broken(ast.parse(source), room) != []


@pytest.mark.parametrize("habit", HABITS)
def test_no_forbidden_habit_in_the_package(habit: str) -> None:
    found = findings(PACKAGE_FILES, HABITS[habit])
    assert found == {}


@pytest.mark.parametrize(("habit", "source"), [(habit, s) for habit, sources in SAMPLES.items() for s in sources])
def test_a_forbidden_habit_is_seen(habit: str, source: str) -> None:
    assert HABITS[habit](ast.parse(source)) != []


def test_unsafe_formats_are_met_only_where_others_are_read_and_written() -> None:
    found = findings(PACKAGE_FILES, unsafe_formats)
    assert {path: set(what) for path, what in found.items()} == FOREIGN_FORMATS


@pytest.mark.parametrize("source", ["import pickle", "from cloudpickle import dumps", "torch.save(state, path)"])
def test_an_unsafe_format_is_seen(source: str) -> None:
    assert unsafe_formats(ast.parse(source)) != []


def test_no_shell_and_no_bare_import_outside_the_package() -> None:
    files = [path for path in ALL_FILES if path not in PACKAGE_FILES]
    assert findings(files, lambda tree: shells(tree) + bare_imports(tree)) == {}


def test_modules_fit_in_the_head() -> None:
    product = set(PACKAGE_FILES)
    lengths = {path: len(path.read_text().splitlines()) for path in ALL_FILES}
    limits = {path: MAX_LINES if path in product else MAX_TEST_LINES for path in ALL_FILES}
    assert {relative(path): lines for path, lines in lengths.items() if lines > limits[path]} == {}


def test_modules_are_named_for_their_subject() -> None:
    assert [relative(path) for path in ALL_FILES if path.name in FORBIDDEN_NAMES] == []


def test_top_level_rooms_are_linked_into_the_package_relatively() -> None:
    links = [entry for entry in (ROOT / "resilio_hpc").iterdir() if entry.is_symlink()]
    assert {link.name: str(link.readlink()) for link in links} == {name: f"../{name}" for name in TOP_LEVEL_ROOMS}


@pytest.mark.parametrize("room", FLOORS)
def test_public_names_exist(room: str) -> None:
    package = importlib.import_module(f"resilio_hpc.{room}")
    public = getattr(package, "__all__", [])
    assert sorted(set(public)) == sorted(public)
    assert [name for name in public if not hasattr(package, name)] == []
    assert [name for name in public if callable(getattr(package, name)) and not getattr(package, name).__doc__] == []


def class_names(tree: ast.AST) -> list[str]:
    """Public classes that are defined here."""
    return [node.name for node in walked(tree) if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]


def test_a_class_name_stands_for_one_thing() -> None:
    names = Counter(name for path in PACKAGE_FILES for name in class_names(parsed(path)))
    assert {name for name, count in names.items() if count > 1} == set()


PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")])


def anchors(page: Path) -> set[str]:
    """The anchors that a Markdown page's headings get on a code forge."""
    headings = re.findall(r"^#+ +(.+?) *$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    """Relative links of a page whose file or heading is not there."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


def test_links_between_pages_lead_somewhere() -> None:
    broken = {relative(page): broken_links(page) for page in PAGES}
    assert {page: links for page, links in broken.items() if links} == {}


def test_a_broken_link_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One thing\n[a](#one-thing) [b](page.md) [c](gone.md) [d](#another) [e](https://example.org)\n")
    assert broken_links(page) == ["gone.md", "#another"]
