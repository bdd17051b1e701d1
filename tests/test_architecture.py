"""DESIGN's arrows, enforced: who may import whom, how long a file may be, and what no code here may do."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent / "calibrate"
FILES = sorted(ROOT.rglob("*.py"))
MODULES = {".".join(("calibrate", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path for path in FILES}
FOUNDATION = {"errors", "artefact", "progress", "resources", "host", "ranks"}

# room → rooms it may import besides the foundation. A room that is missing here may import nothing: add it with its arrows from DESIGN.
ARROWS: dict[str, set[str]] = {
    "corpus": set(),
    "model": set(),
    "statistics": set(),
    "collect": {"corpus", "model", "statistics"},
    "scales": {"statistics"},
    "kvarn": {"statistics"},
    "checkpoint": {"model", "scales", "statistics", "kvarn"},
    "lowbit": {"model", "scales", "statistics", "kvarn"},  # formats that run in the transformers engine's cache
    "engines": {"checkpoint", "model", "scales", "statistics", "lowbit"},  # the transformers engine loads models and quantizes their cache
    "weights": {"corpus", "model", "checkpoint", "engines", "scales"},  # of engines: ending a child, reading its log
    "fold": {"corpus", "model", "collect", "scales", "statistics", "checkpoint"},  # it runs a model on some rows, and writes with checkpoint's tools
    "evaluate": {
        "engines",
        "corpus",
        "model",
        "checkpoint",
        "collect",
        "scales",
        "statistics",
        "lowbit",
        "kvarn",
    },  # it makes the baselines that it compares with
    "gate": {"evaluate", "engines", "checkpoint", "model", "scales", "statistics"},  # it reads what these wrote; it runs none of them
    "report": {"gate", "evaluate", "scales", "statistics"},  # their results and how those are read; it computes none
    "recipes": {"scales"},
    "families": {"corpus", "model", "statistics", "collect", "scales", "checkpoint", "engines", "recipes", "pipeline"},  # the main job on tiny models
    "inspection": {"checkpoint", "scales", "statistics"},
}
ABOVE = {"pipeline", "trials", "steps", "tables", "cli", "__main__", "__init__"}  # these put the rooms together
# file → why it may catch everything
CATCHES_ALL = {
    "engines/light_child.py": "a matrix over many models: one that fails is a row with its message",
    "families/check.py": "the same, for what happens before vLLM",
}
SPEAKS_OF_VLLM = {"engines", "evaluate", "host"}


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def above(name: str) -> bool:
    return name in ABOVE or name.startswith("cli_")


def imports(path: Path, *, at_import_time: bool = False) -> set[str]:
    """Every module that a file imports, as a dotted name; `from a import b` gives a.b where that is a module, else a."""
    found = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body if at_import_time else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for name in (f"{node.module}.{alias.name}" for alias in node.names):
                found.add(name if name in MODULES else node.module)
    return found


def rooms_of(path: Path) -> set[str]:
    known = {room(file) for file in FILES}
    return {name.split(".")[1] for name in imports(path) if name.startswith("calibrate.") and name.split(".")[1] in known}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_follow_the_arrows(path):
    here = room(path)
    if above(here):
        return
    allowed = ARROWS.get(here, set()) | FOUNDATION | {here}
    wrong = rooms_of(path) - allowed
    assert not wrong, f"{here} imports {wrong}: DESIGN allows {sorted(allowed)}"


def test_the_foundation_stands_alone():
    for name in FOUNDATION:
        assert rooms_of(ROOT / f"{name}.py") <= FOUNDATION


def test_modules_import_each_other_in_no_circle():
    graph = {name: imports(path, at_import_time=True) & set(MODULES) - {name} for name, path in MODULES.items()}
    state: dict[str, int] = {}

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert state.get(name) != 1, "circle: " + " → ".join((*trail[trail.index(name) :], name))
        if state.get(name) == 2:
            return
        state[name] = 1
        for other in sorted(graph[name]):
            visit(other, (*trail, name))
        state[name] = 2

    for name in sorted(graph):
        visit(name, ())
    assert len(state) == len(FILES)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_file_reaches_three_hundred_lines(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) < 300


def _raises(handler: ast.ExceptHandler) -> bool:
    return isinstance(handler.body[-1], ast.Raise)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_nothing_is_swallowed_and_nothing_is_unpickled_or_evaluated(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ExceptHandler):
            caught = {part.id for part in ast.walk(node.type) if isinstance(part, ast.Name)} if node.type else {"BaseException"}
            goes_on = caught & {"Exception", "BaseException"} and not _raises(node)
            assert not goes_on or name_of(path) in CATCHES_ALL, f"{path}:{node.lineno} catches everything and goes on"
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in {"eval", "exec", "torch.load", "compile", "os.system"}, f"{path}:{node.lineno} calls {called}"
    forbidden = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
    assert not {name.split(".")[0] for name in imports(path)} & forbidden


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_only_the_engines_speak_to_vllm(path):
    spoken = {name for name in imports(path) if name.split(".")[0] == "vllm"}
    assert not spoken or room(path) in SPEAKS_OF_VLLM


def test_every_room_has_arrows_and_says_what_it_is():
    for path in FILES:
        assert room(path) in set(ARROWS) | FOUNDATION or above(room(path)), f"{room(path)} has no arrows here"
        if path.name == "__init__.py":
            assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), f"{name_of(path)} has no docstring"
