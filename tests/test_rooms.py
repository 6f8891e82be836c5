"""The architecture as a test: which room may import which, and the rules of the house."""

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "headrace"

# A room is a folder or a file directly under src/headrace; it may always import itself.
ROOMS: dict[str, set[str]] = {
    "model": set(),
    "storage": {"model"},
    "engines": {"model", "storage"},
    "embedded": {"model", "storage"},  # the log without a server
    "security": {"model"},
    "wire": {"model"},
    "broker": {"model", "security", "engines.api"},
    "middleware": {"model"},  # of Headrace itself, and its interface for authors of plug-ins
    "plugins": {"model"},  # finds and loads entry points
    "sinks": {"model", "plugins"},  # where messages go, outside the broker
    "runtime": {"model"},  # the clock and the scheduler on the event loop
    "gateways": {"model", "wire", "security", "broker", "runtime", "plugins"},
    "push": {"model", "broker", "security", "runtime"},  # what the broker sends over HTTP by itself
    "cluster": {"model", "wire", "security", "storage", "plugins", "client"},  # client: followers connect to the owner
    "client": {"model", "wire", "security", "plugins", "sinks"},
    "spark": {"model", "client", "wire", "storage"},  # of storage, reading only
    "console": {"model", "client", "server"},
    "offline": {"model", "storage", "engines", "broker", "server"},  # data of an earlier format
    "cli": {
        *{"model", "security", "client", "server", "offline", "embedded", "storage", "spark", "bench"},
        *{"plugins", "sinks"},
    },
    "bench": {"model", "storage", "embedded", "client", "server"},  # what the bench commands and benchmarks/ share
    "testing": {
        *{"model", "storage", "engines", "broker", "runtime", "client", "embedded"},
        *{"plugins", "gateways", "sinks", "server"},  # whose conformance it checks
        "cluster",  # whose nodes it simulates
    },
    "errors": {"model"},  # the public name of the model's errors
    "__init__": {"model", "errors", "embedded", "client", "server"},
    "__main__": {"cli"},
}
ROOMS["server"] = ROOMS.keys() - {"testing", "__init__", "__main__"}

CLOCKLESS = {"model", "storage", "engines", "broker"}
CLOCKS = {f"time.{name}{unit}" for name in ("time", "monotonic", "perf_counter") for unit in ("", "_ns")}
CLOCKS |= {f"datetime.datetime.{name}" for name in ("now", "utcnow", "today")} | {"datetime.date.today"}
ENGINE_PARTS = {"pending", "statuses", "leases", "contents"}
DISK_ROOMS = {"storage", "engines", "broker"}
"""Rooms whose files are on the Disk that they are given: another disk, and the whole broker is somewhere else."""
SYSTEM_DOOR = "storage/disk.py"
SYSTEM_MODULES = {
    "os",
    "posix",
    "posixpath",
    "io",
    "_io",
    "pathlib",
    "shutil",
    "tempfile",
    "glob",
    "fileinput",
    "linecache",
}
SYSTEM_MODULES |= {"mmap", "fcntl", "ctypes", "resource", "multiprocessing", "subprocess", "pty"}
SYSTEM_MODULES |= {"socket", "socketserver", "ssl", "select", "selectors", "http", "urllib"}
SYSTEM_MODULES |= {"sqlite3", "dbm", "shelve", "zipfile", "tarfile", "gzip", "bz2", "lzma"}
LOG_CLASSES = {"LogReader", "StoredLog", "GroupCommitLog", "FileLog", "MemoryLog"}
LOG_CLASSES |= {"OfflineLogReader", "OfflinePartitionReader", "Follower"}
FUTEX_DOOR = "storage/beacon.py"  # ctypes only: sleeping on a word of memory is no file's business

FILE_LINES_REPORTED, FILE_LINES_MAX = 400, 600
FUNCTION_LINES_REPORTED, FUNCTION_LINES_MAX = 40, 100
METHODS_REPORTED = 25
TYPING_CYCLES_MAX = 7
"""How many groups of modules may import each other in a circle if imports for type checkers count; may only shrink."""
GENERATED = "client/_sync/"

Function = ast.FunctionDef | ast.AsyncFunctionDef
Found = Iterator[tuple[int, str]]  # a line and what is there


@dataclass(frozen=True)
class Module:
    """One source file; `path` counts from src/headrace."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @property
    def room(self) -> str:
        return self.path.split("/")[0].removesuffix(".py")

    @property
    def name(self) -> str:
        """The dotted name it is imported by."""
        return ".".join(["headrace", *self.path.removesuffix(".py").split("/")]).removesuffix(".__init__")


@cache
def read_source() -> list[Module]:
    files = sorted(SOURCE.rglob("*.py"))
    assert files, f"no source in {SOURCE}"
    return [Module(file.relative_to(SOURCE).as_posix(), file.read_text(encoding="utf-8")) for file in files]


def dotted(node: ast.AST) -> str:
    """A name, with those that lead to it; nothing for any other expression."""
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)):
        return f"{before}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def imports(module: Module, typing_too: bool = True) -> Found:
    """Line and full dotted name of everything imported, also inside functions."""
    skipped: set[ast.AST] = set()
    for node in module.nodes:
        if isinstance(node, ast.If) and dotted(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
            skipped.update(inner for statement in node.body for inner in ast.walk(statement))
    for node in module.nodes:
        if node in skipped and not typing_too:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def names_used(module: Module) -> Found:
    """Line and full dotted name of everything mentioned, with import aliases resolved."""
    known: dict[str, str] = {}
    for node in module.nodes:
        if isinstance(node, ast.Import):
            known.update({alias.asname: alias.name for alias in node.names if alias.asname})
        elif isinstance(node, ast.ImportFrom):
            known.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    for node in module.nodes:
        if isinstance(node, ast.Name | ast.Attribute):
            first, dot, rest = dotted(node).partition(".")
            yield node.lineno, known.get(first, first) + dot + rest


# The rules. Each yields the lines that break it and says how.


def imports_outside_the_table(module: Module) -> Found:
    allowed = ROOMS.get(module.room, set()) | {module.room}
    for line, name in imports(module):
        top, _, target = name.partition(".")
        if target.split(".")[0] not in ROOMS:
            target = "__init__"  # a name that the package itself offers
        if top == "headrace" and not any(f"{target}.".startswith(f"{room}.") for room in allowed):
            yield line, f"{module.room} may not import {name}"


def relative_imports(module: Module) -> Found:
    for node in module.nodes:
        if isinstance(node, ast.ImportFrom) and node.level:
            yield node.lineno, "imports are absolute"


def clock_reads(module: Module) -> Found:
    if module.room in CLOCKLESS:
        found = [*imports(module), *names_used(module)]
        yield from ((line, f"{name}: time is an argument here") for line, name in found if name in CLOCKS)


def reaches_into_engines(module: Module) -> Found:
    """The broker calls a subscription's index of a partition by the verbs of engines/api.py, not by its parts."""
    for node in module.nodes if module.room == "broker" else ():
        if isinstance(node, ast.Attribute) and node.attr in ENGINE_PARTS and dotted(node.value) != "self":
            yield node.lineno, f".{node.attr} is a part of an index: call a verb of engines/api.py"


def back_patched(module: Module) -> Found:
    """The broker is wired forwards: a constructor sets attributes of its own object only."""
    for node in module.nodes if module.room == "broker" else ():
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            for inner in ast.walk(node):
                targets = inner.targets if isinstance(inner, ast.Assign) else []
                named = [one for target in targets for one in ast.walk(target) if isinstance(one, ast.Attribute)]
                for target in named:
                    if isinstance(target.ctx, ast.Store) and dotted(target.value) != "self":
                        yield target.lineno, f"{dotted(target)} is set from outside: pass it to the constructor"


def second_doors_to_the_system(module: Module) -> Found:
    if module.room not in DISK_ROOMS or module.path == SYSTEM_DOOR:
        return
    allowed = {"ctypes"} if module.path == FUTEX_DOOR else set()
    for line, name in imports(module):
        if name.split(".")[0] in SYSTEM_MODULES - allowed:
            yield line, f"only {SYSTEM_DOOR} imports {name.split('.')[0]}"
    for line, name in names_used(module):
        if name in {"open", "builtins.open", "__import__", "importlib.import_module"}:
            yield line, f"only {SYSTEM_DOOR} opens files: use the Disk"


def logs_asked_for_their_kind(module: Module) -> Found:
    """The log interface answers by what it does: see storage/stored_log.py."""
    for node in module.nodes:
        if isinstance(node, ast.Call) and dotted(node.func) == "isinstance" and len(node.args) == 2:
            for kind in ast.walk(node.args[1]):
                if (name := dotted(kind).split(".")[-1]) in LOG_CLASSES:
                    yield node.lineno, f"asks whether a log is a {name}; use or extend the interface"


def swallowed_errors(module: Module) -> Found:
    for node in module.nodes:
        if isinstance(node, ast.ExceptHandler):
            kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            blind = any(kind is None or dotted(kind) in {"Exception", "BaseException"} for kind in kinds)
            if blind and all(isinstance(step, ast.Pass) for step in node.body):
                yield node.lineno, "an error of any kind disappears here"


def leftover_markers(module: Module) -> Found:
    for number, line in enumerate(module.text.splitlines(), 1):
        if found := re.search(r"\b(TODO|FIXME|XXX)\b", line):
            yield number, f"{found[0]} left behind"


def missing_docstrings(module: Module) -> Found:
    """Modules, public classes and functions, and public methods of public classes need one."""
    if not ast.get_docstring(module.tree):
        yield 1, "the module has no docstring"
    parents: list[ast.Module | ast.ClassDef] = [module.tree]
    for parent in parents:
        for node in parent.body:
            if not isinstance(node, ast.ClassDef | Function) or node.name.startswith("_"):
                continue
            if isinstance(node, ast.ClassDef):
                parents.append(node)  # the loop over parents comes to it
            if isinstance(node, Function) and ast.unparse(node.body[-1]) == "...":
                continue  # a protocol's line: what it means stands with the class that does it
            marks = {ast.unparse(mark).split(".")[-1] for mark in node.decorator_list}
            if not ast.get_docstring(node) and not marks & {"overload", "override", "setter", "deleter"}:
                yield node.lineno, f"{node.name} has no docstring"


def prints_outside_cli(module: Module) -> Found:
    for node in module.nodes:
        if isinstance(node, ast.Call) and dotted(node.func) == "print" and module.room != "cli":
            yield node.lineno, "only cli prints"


def too_long(module: Module, file_max: int = FILE_LINES_MAX, function_max: int = FUNCTION_LINES_MAX) -> Found:
    """Long files and functions; docstrings do not count."""
    if (length := len(module.text.splitlines()) - documented_lines(module.tree)) > file_max:
        yield 1, f"the file has {length} lines, more than {file_max}"
    for node in module.nodes:
        if isinstance(node, Function):
            length = (node.end_lineno or 0) - node.lineno + 1 - documented_lines(node)
            if length > function_max:
                yield node.lineno, f"{node.name} has {length} lines, more than {function_max}"


def documented_lines(tree: ast.AST) -> int:
    """How many lines the docstrings in a tree have."""
    lines = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | Function) and ast.get_docstring(node, clean=False):
            lines += (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
    return lines


def import_cycles(modules: Iterable[Module], typing_too: bool) -> list[list[str]]:
    """Groups of modules that import each other in a circle; `typing_too` counts imports for type checkers."""
    known = {module.name: module for module in modules}
    graph: dict[str, set[str]] = {name: set() for name in known}
    for importer, module in known.items():
        for _, imported in imports(module, typing_too):
            while imported and imported not in known:  # a class or function: its module is what is imported
                imported = imported.rpartition(".")[0]
            if imported and imported != importer:
                graph[importer].add(imported)
    reached = {name: _reached(graph, name) for name in graph}
    groups = {frozenset(each for each in ends if name in reached[each]) for name, ends in reached.items()}
    return sorted(sorted(group) for group in groups if group)


def _reached(graph: dict[str, set[str]], start: str) -> set[str]:
    """What `start` imports, and what that imports, and so on."""
    found: set[str] = set()
    new = list(graph[start])
    while new:
        name = new.pop()
        if name not in found:
            found.add(name)
            new.extend(graph[name])
    return found


def repeated_class_names(modules: Iterable[Module]) -> list[str]:
    """Names of classes that stand in two modules or more, with the modules."""
    places: dict[str, list[str]] = {}
    for module in modules:
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not module.path.startswith(GENERATED):
                places.setdefault(node.name, []).append(module.path)
    return [f"{name}: {', '.join(paths)}" for name, paths in sorted(places.items()) if len(paths) > 1]


def classes_with_many_methods(modules: Iterable[Module], most: int = METHODS_REPORTED) -> list[str]:
    """Classes with more methods than `most`."""
    counts = [
        (
            sum(isinstance(inner, Function) for inner in node.body),
            f"src/headrace/{module.path}:{node.lineno}: {node.name}",
        )
        for module in modules
        if not module.path.startswith(GENERATED)
        for node in module.nodes
        if isinstance(node, ast.ClassDef)
    ]
    return [f"{where} has {count} methods" for count, where in sorted(counts, reverse=True) if count > most]


def strangers(folder: Path) -> set[str]:
    """Folders and modules directly in `folder` that are no known room; caches do not count."""
    files = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    kept = [path.parts for path in files if "__pycache__" not in path.parts and not path.parts[0].startswith(".")]
    return {parts[0].removesuffix(".py") for parts in kept if len(parts) > 1 or parts[0].endswith(".py")} - ROOMS.keys()


# Every rule, with code that breaks it.
Rule = Callable[[Module], Found]
RULES: dict[Rule, list[tuple[str, str]]] = {
    imports_outside_the_table: [
        ("model/topic.py", "from headrace.storage.log import Log"),
        ("storage/log.py", "def late():\n    import headrace.broker"),
        ("storage/log.py", "if TYPE_CHECKING:\n    from headrace import engines"),
        ("broker/publish.py", "from headrace.engines import leased"),
        ("client/producer.py", "from headrace import open"),
        ("server.py", "from headrace.testing import clock"),
    ],
    relative_imports: [("model/topic.py", "from . import errors"), ("model/topic.py", "from ..wire import frame")],
    clock_reads: [
        ("storage/log.py", "import time\nnow = time.time_ns()"),
        ("engines/cursor.py", "from time import monotonic"),
        ("model/message.py", "import time as t\nclock = t.monotonic_ns"),
        ("broker/groups.py", "from datetime import datetime\ndatetime.now(UTC)"),
        ("broker/groups.py", "import datetime\ndatetime.datetime.utcnow()"),
    ],
    reaches_into_engines: [
        ("broker/leasing.py", "def due(index): return index.pending.ready.first_key"),
        ("broker/leasing.py", "subscription.indexes[0].statuses.change([1], 2)"),
        ("broker/leasing.py", "subscription.indexes[0].leases.get(1)"),
    ],
    back_patched: [
        ("broker/broker.py", "class B:\n    def __init__(self): self._topics.on_change = self._changed"),
        ("broker/leasing.py", "class B:\n    def __init__(self, a): self.a, a.served = a, self._serve"),
    ],
    second_doors_to_the_system: [
        ("storage/log.py", "import os.path"),
        ("storage/pool.py", "from mmap import mmap"),
        ("engines/store.py", "from pathlib import Path"),
        ("engines/leased/index.py", "import shutil"),
        ("broker/repair.py", "def late():\n    import tempfile"),
        ("broker/topics.py", "with open('/etc/hosts') as file: pass"),
        ("engines/journal.py", "from builtins import open as look\nlook('journal')"),
        ("storage/segment.py", "import ctypes"),
        ("broker/broker.py", "import socket"),
    ],
    logs_asked_for_their_kind: [
        ("engines/partition.py", "if isinstance(log, FileLog): pass"),
        ("embedded/log.py", "assert isinstance(self._stored, log.FileLog | memory.MemoryLog)"),
    ],
    swallowed_errors: [("cli/a.py", f"try: x\nexcept{kind}: pass") for kind in ("", " Exception", " (A, Exception)")],
    leftover_markers: [("model/topic.py", "x = 1  # TODO"), ("model/topic.py", "# FIXME: y"), ("model/a.py", "# XXX")],
    missing_docstrings: [
        ("model/topic.py", "x = 1"),
        ("model/topic.py", "'''Words.'''\nasync def publish(): return 1"),
        ("model/topic.py", "'''Words.'''\nclass Topic:\n    '''One.'''\n    def name(self): return 1"),
    ],
    prints_outside_cli: [("model/topic.py", "print('here')")],
    too_long: [("model/topic.py", "x = 1\n" * 601), ("model/topic.py", "def f():\n" + "    go()\n" * 100)],
}


@pytest.mark.parametrize(("rule", "path", "text"), [(rule, *bad) for rule, cases in RULES.items() for bad in cases])
def test_rule_can_fail(rule: Rule, path: str, text: str) -> None:
    assert list(rule(Module(path, text)))


GOOD = [
    ("storage/disk.py", "import os, mmap"),
    ("storage/beacon.py", "import ctypes"),
    ("storage/segment.py", "file = disk.open(path)"),
    ("gateways/http.py", "import os, socket\nopen(path)"),
    ("broker/publish.py", "from headrace.engines.api import Engine\nfrom headrace.broker import groups"),
    ("broker/leasing.py", "class _B:\n    def __init__(self, a):\n        self.a = a\n        a.ready.connect(self.a)"),
    ("broker/leasing.py", "def _due(index): return index.next_times()"),
    ("engines/leased/index.py", "def _due(index): return index.pending.ready.first_key"),
    ("gateways/http.py", "import time\nnow = time.time()"),
    ("cli/main.py", "try:\n    print(1)\nexcept OSError:\n    pass"),
    ("__init__.py", "from headrace.embedded import open\ndef _hidden(): ..."),
]


@pytest.mark.parametrize(("path", "text"), GOOD)
def test_good_code_passes(path: str, text: str) -> None:
    assert [why for rule in RULES for _, why in rule(Module(path, f"'''Documented.'''\n{text}"))] == []


def test_cycles_are_found() -> None:
    log = Module("storage/log.py", "from headrace.storage import segment")
    segment = "def late():\n    from headrace.storage.log import Log"
    for_types = Module("storage/segment.py", segment.replace("def late()", "if TYPE_CHECKING"))
    circle = ["headrace.storage.log", "headrace.storage.segment"]
    assert import_cycles([log, Module("storage/segment.py", segment)], typing_too=False) == [circle]
    assert import_cycles([log, for_types], typing_too=True) == [circle]
    assert import_cycles([log, for_types], typing_too=False) == []


def test_repeated_names_and_large_classes_are_found() -> None:
    twice = [Module("model/a.py", "class Outcome: ..."), Module("wire/b.py", "class Outcome: ...")]
    assert repeated_class_names([*twice, Module("client/_sync/c.py", "class Other: ...")]) == [
        "Outcome: model/a.py, wire/b.py"
    ]
    documented = Module("model/a.py", 'def f():\n    """Words.\n' + "\n" * 700 + '    """\n')
    assert list(too_long(documented)) == []
    large = Module("model/a.py", "class Large:\n" + "".join(f"    def f{number}(self): ...\n" for number in range(3)))
    assert classes_with_many_methods([large], most=2) == ["src/headrace/model/a.py:1: Large has 3 methods"]


def test_stranger_is_found(tmp_path: Path) -> None:
    for name in ("model/topic.py", "attic/page.md", "loose.py", "py.typed", "gone/__pycache__/old.pyc", ".cache/x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert strangers(tmp_path) == {"attic", "loose"}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_house_keeps_rule(rule: Rule) -> None:
    broken = [f"src/headrace/{module.path}:{line}: {why}" for module in read_source() for line, why in rule(module)]
    assert not broken, "\n" + "\n".join(broken)


def test_every_room_is_in_the_table() -> None:
    assert strangers(SOURCE) == set()


def test_no_import_cycles(record_property: Callable[[str, object], None]) -> None:
    assert import_cycles(read_source(), typing_too=False) == []
    for_types = [" and ".join(circle) for circle in import_cycles(read_source(), typing_too=True)]
    record_property("modules that import each other for type checkers", for_types)  # tests/conftest.py shows it
    assert len(for_types) <= TYPING_CYCLES_MAX, "\n".join(for_types)


def test_repeated_class_names_are_reported(record_property: Callable[[str, object], None]) -> None:
    record_property("class names that stand in several modules", repeated_class_names(read_source()))


def test_classes_with_many_methods_are_reported(record_property: Callable[[str, object], None]) -> None:
    record_property("classes with many methods", classes_with_many_methods(read_source()))


def test_long_files_and_functions_are_reported(record_property: Callable[[str, object], None]) -> None:
    long = [
        f"src/headrace/{module.path}:{line}: {why}"
        for module in read_source()
        for line, why in too_long(module, FILE_LINES_REPORTED, FUNCTION_LINES_REPORTED)
    ]

    record_property("longer than we like", long)  # tests/conftest.py shows it
