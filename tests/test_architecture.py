"""The house rules that can be checked: which way imports point, who may use what, how long things are.

A rule broken on purpose is listed here with its reason, or it is not broken.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "lqs"
PYTHON = sorted(PACKAGE.rglob("*.py"))
COMPILED = sorted(path for kind in ("pyx", "pxi", "pxd") for path in PACKAGE.rglob(f"*.{kind}"))
SOURCES = [*PYTHON, *COMPILED]

# From the door to the cellar. A room imports from rooms further down, and from itself.
FLOORS = (
    {"__main__"},
    {"cli"},
    {"commands"},
    {"simulate"},
    {"serve", "supervise", "collector", "guard", "reload", "cards", "load_watch", "machinery"},
    {"leave"},
    {"listen", "upkeep"},
    {"transport", "sockets", "parent", "lineage", "process"},
    {"api"},
    {"admission"},
    {"scheduling"},
    {"engine", "streaming"},
    {"placement"},
    {"observe"},
    {"settings"},
    {"request", "config", "config_file", "wording", "plain"},
    {
        *("overflow", "config_engine", "config_health", "config_limits", "config_models", "config_placement"),
        *("config_tiers", "protection"),
    },
    {"errors", "describe"},
    {"_engine"},
    {"_core"},
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
# Read as one part although they are several files.
NEIGHBOURS = {
    *(("serve", name) for name in ("collector", "guard", "reload", "load_watch", "machinery")),
    ("machinery", "cards"),
}

# Each foreign library comes in by one door.
DOORS = {
    "llama_cpp": {"engine/library.py"},
    "lqs._engine": {"engine/library.py"},
    "pynvml": {"placement/nvml.py"},
    "starlette": {"api"},
    "uvicorn": {"serve.py", "listen.py"},
    "httptools": {"serve.py", "listen.py"},
    "uvloop": {"serve.py"},
    "prometheus_client": {"observe/metrics.py", "observe/families.py", "observe/gpus.py", "observe/models.py"},
    "jinja2": {"engine"},
    "numpy": {"engine/synth"},
}

FUNCTION_LINES_MAX = 60
FILE_LINES_MAX = 300
COMPILED_FILE_LINES_MAX = 800


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full module name of every import, those inside functions and for types too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno}: import by the full name"
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


def test_every_room_has_its_floor() -> None:
    rooms = {room_of(path) for path in PYTHON} - {"__init__"}
    assert rooms - set(FLOOR_OF) == set()


def test_imports_point_one_way() -> None:
    wrong = []
    for path in PYTHON:
        room = room_of(path)
        for line, module in imports_of(path):
            parts = module.split(".")
            if parts[0] != "lqs" or len(parts) < 2 or parts[1] == room or room == "__init__":
                continue
            if FLOOR_OF[parts[1]] <= FLOOR_OF[room] and (room, parts[1]) not in NEIGHBOURS:
                wrong.append(f"{name_of(path)}:{line} imports {module}")
    assert wrong == []


@pytest.mark.parametrize("library", DOORS)
def test_a_foreign_library_comes_in_by_its_own_door(library: str) -> None:
    doors = tuple(DOORS[library])
    wrong = [
        f"{name_of(path)}:{line}"
        for path in PYTHON
        for line, module in imports_of(path)
        if f"{module}.".startswith(f"{library}.") and not name_of(path).startswith(doors)
    ]
    assert wrong == []


def is_declaration(node: ast.stmt) -> bool:
    """Whether a statement at the top of a module neither does work nor makes state."""
    match node:
        case ast.Import() | ast.ImportFrom() | ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return True
        case ast.Expr(value=ast.Constant()):
            return True
        case ast.Assign(targets=[ast.Name()], value=ast.Name() | ast.Attribute()):
            # Another name for something.
            return True
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            return name.lstrip("_")[:1].isupper() or name == "__all__"
        case ast.Assign(targets=[ast.Tuple(elts=names)]):
            return all(isinstance(name, ast.Name) and name.id.isupper() for name in names)
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case ast.If(test=ast.Compare(left=ast.Name(id="__name__"))):
            return True
    return False


def test_modules_hold_no_state_and_do_no_work_at_import() -> None:
    wrong = []
    for path in PYTHON:
        tree = ast.parse(path.read_text())
        wrong += [f"{name_of(path)}:{node.lineno}" for node in tree.body if not is_declaration(node)]
        wrong += [f"{name_of(path)}:{node.lineno} global" for node in ast.walk(tree) if isinstance(node, ast.Global)]
    assert wrong == []


def python_functions(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield f"{name_of(path)}:{node.lineno} {node.name}", node.end_lineno - node.lineno + 1


def compiled_functions(path: Path) -> Iterator[tuple[str, int]]:
    """Functions of a Cython file: from a `def` or `cdef` with a body to the last line indented below it."""
    lines = path.read_text().splitlines()
    for start, line in enumerate(lines):
        if not re.match(r"\s*(cdef|cpdef|def)\b.*\(", line):
            continue
        body = start
        while body < len(lines) - 1 and not lines[body].split("#")[0].rstrip().endswith(":"):
            body += 1
        indent = len(line) - len(line.lstrip())
        end = last = body
        while end + 1 < len(lines) and (not lines[end + 1].strip() or lines[end + 1].startswith(" " * (indent + 1))):
            end += 1
            if lines[end].strip():
                last = end
        yield f"{name_of(path)}:{start + 1}", last - start + 1


def test_functions_fit_on_a_screen() -> None:
    functions = [found for path in PYTHON for found in python_functions(path)]
    functions += [found for path in COMPILED if path.suffix != ".pxd" for found in compiled_functions(path)]
    assert [(name, lines) for name, lines in functions if lines > FUNCTION_LINES_MAX] == []


def test_files_are_short() -> None:
    sizes = {path: len(path.read_text().splitlines()) for path in SOURCES}
    too_long = {
        name_of(path): lines
        for path, lines in sizes.items()
        if lines > (COMPILED_FILE_LINES_MAX if path in COMPILED else FILE_LINES_MAX)
    }
    assert too_long == {}


def code_of(path: Path) -> Iterator[tuple[str, str]]:
    """Place and text of each line of a compiled module's source, without its comment."""
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        yield f"{name_of(path)}:{number}", line.split("#")[0]


def test_native_loops_never_take_the_gil() -> None:
    assert [place for path in COMPILED for place, code in code_of(path) if "with gil" in code] == []


def test_the_core_knows_no_clock() -> None:
    core = [path for path in COMPILED if path.stem == "_core" or room_of(path) == "core"]
    clock = re.compile(r"clock_gettime|gettimeofday|libc\.time|cpython\.time|time\.(monotonic|perf_counter)")
    assert [place for path in core for place, code in code_of(path) if clock.search(code)] == []


def test_cython_directives_are_the_builds_alone() -> None:
    wrong = [
        name_of(path)
        for path in COMPILED
        if re.search(r"^# *cython: *\w*(boundscheck|initializedcheck|cdivision)", path.read_text(), re.MULTILINE)
    ]
    assert wrong == []


def test_no_file_names_a_place_on_this_machine() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=False).stdout
    files = [REPOSITORY / name for name in listed.splitlines()] or SOURCES
    places = [str(place) for place in (REPOSITORY, Path.home()) if place != Path("/")]
    wrong = [
        str(path.relative_to(REPOSITORY))
        for path in files
        if path.is_file() and any(f"{place}/" in path.read_text(errors="replace") for place in places)
    ]
    assert wrong == []
