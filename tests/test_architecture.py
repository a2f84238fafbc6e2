"""Rules that a linter cannot check: imports, module sizes, names."""

import ast
import re
import subprocess
import sys
import typing
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from headwater.cache import CacheConfig, TieredCache

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "headwater"
LONGEST = 400
LONGEST_KERNEL = 550
"""Triton inlines the device functions of a kernel; they are read and changed together."""

WORD_ENDING = re.compile(r"(ings?|ers?|ors?|ed|ies|es|s|e|y)$")

SIMILAR_MODULES: set[tuple[str, str, str]] = set()
"""Pairs that are still to be renamed. This set stays empty."""


CALLED_BY_OTHERS = {"capture_signals", "lease_end_s"}
"""A method that uvicorn calls, and the state of a hand-off that only tests ask for."""


OF_OTHER_ENGINES = {"TieringOffloadingSpec"}
"""Classes of other engines that docstrings name and the code does not use."""


def test_the_drawing_of_layers_has_every_package():
    """A reader of docs/architecture.md finds the place of each package."""
    drawing = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split("```")[1]
    packages = {
        path.stem
        for path in SOURCE.iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }

    assert packages - set(re.findall(r"\w+", drawing)) == {"__init__", "__main__"}


def test_the_core_imports_without_torch_and_without_server_libraries():
    """Cache, scheduler and loop start on a machine that has numpy only."""
    absent = ("torch", "transformers", "msgspec", "zmq", "starlette", "uvicorn", "tokenizers")
    script = "import sys\n" + "".join(f"sys.modules[{name!r}] = None\n" for name in absent)
    script += "import headwater, headwater.cli, headwater.cache, headwater.scheduler\n"
    script += "import headwater.engine.core, headwater.bench.cache, headwater.testing.runners\n"

    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: p.name)
def test_a_module_says_what_it_is_for_and_stays_short(path):
    """A file above the limit has a second subject."""
    text = path.read_text()

    longest = LONGEST_KERNEL if path.parent.name == "kernels" else LONGEST
    assert len(text.splitlines()) <= longest
    assert path.name == "__init__.py" or text.startswith(('"""', "#!"))


def test_a_public_class_name_is_defined_once():
    """One name, one thing: a reader who searches for a class finds one definition."""
    places = defaultdict(list)
    for path in SOURCE.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(SOURCE)))

    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_no_two_modules_of_a_package_differ_only_by_a_plural_or_suffix():
    """A reader cannot remember which of `decode` and `decodes` does what."""
    stems = defaultdict(list)
    for path in SOURCE.rglob("*"):
        is_package = (path / "__init__.py").exists()
        if (path.suffix == ".py" and path.stem != "__init__") or is_package:
            package = str(path.parent.relative_to(SOURCE))
            stems[package, stem_of(path.stem)].append(path.stem)
    similar = {
        (package, *sorted(names)) for (package, _), names in stems.items() if len(names) > 1
    }

    assert similar - SIMILAR_MODULES == set()


@pytest.mark.parametrize(
    ("one", "other"),
    [("decode", "decodes"), ("load", "loading"), ("write", "writers"), ("_pd", "pd")],
)
def test_similar_module_names_have_one_stem(one, other):
    """The rule above sees plurals, suffixes and leading underscores."""
    assert stem_of(one) == stem_of(other)


def stem_of(name):
    """`name` without a leading underscore and without its ending."""
    bare = name.lstrip("_")
    stem = WORD_ENDING.sub("", bare)
    return stem if len(stem) > 2 else bare


def test_code_outside_the_cache_uses_methods_of_the_tiered_cache_only():
    """The facade is closed: the parts of a `TieredCache` are private, and no other package
    reaches into them, whatever name the cache has there."""
    cache = TieredCache(CacheConfig(device_blocks=1))
    parts = {name for name in vars(cache) if name.startswith("_")}
    reached = [
        f"{path.relative_to(SOURCE)}:{node.lineno} {ast.unparse(node)}"
        for path in SOURCE.rglob("*.py")
        if path.relative_to(SOURCE).parts[0] != "cache"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr in parts
        and ast.unparse(node.value) not in ("self", "cls")
    ]

    assert reached == []


def test_a_control_verb_is_in_five_files_at_most():
    """Closing a session is in its endpoint, its message, the engine that executes it, and the
    cache."""
    verb = re.compile(r"\b(CloseSession\w*|close_session)\b")
    files = [
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if verb.search(path.read_text(encoding="utf-8"))
    ]

    assert 3 <= len(files) <= 5, files


def test_every_function_and_class_is_used():
    """A name that only its definition has is dead code. Plug-ins implement the interfaces of
    other engines, and `headwater.testing` is for tests."""
    words: Counter[str] = Counter()
    for top in ("src", "benchmarks", "scripts"):
        for path in (ROOT / top).rglob("*"):
            if path.suffix in (".py", "") and path.is_file():
                words.update(re.findall(r"\w+", path.read_text(encoding="utf-8")))
    unused = {
        node.name
        for path in SOURCE.rglob("*.py")
        if path.relative_to(SOURCE).parts[0] not in ("plugins", "testing")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and words[node.name] == 1
        and not node.name.startswith("__")
    }

    assert {name for name in unused if not is_command(name)} == CALLED_BY_OTHERS


def test_classes_that_docstrings_name_exist():
    """A class that was renamed is renamed in prose too."""
    named, known = defaultdict(set), set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Expr(value=ast.Constant(value=str() as text)):
                    for name in re.findall(r"`([A-Z][a-z]+[A-Z]\w*)`", text):
                        named[name].add(str(path.relative_to(SOURCE)))
                case ast.ClassDef(name=name) | ast.Name(id=name) | ast.alias(name=name):
                    known.add(name)

    missing = {name: paths for name, paths in named.items() if name not in known}
    assert set(missing) == OF_OTHER_ENGINES, missing


def is_command(name):
    """`headwater NAME` calls `run_NAME` of `cli/NAME.py`."""
    command = name.removeprefix("run_")
    return name != command and (SOURCE / "cli" / f"{command}.py").exists()


def test_no_method_of_the_tiered_cache_returns_one_of_its_parts():
    """A part that a method returned would be as open as a public attribute."""
    cache = TieredCache(CacheConfig(device_blocks=1))
    private = {type(value) for name, value in vars(cache).items() if name.startswith("_")}
    public = {type(value) for name, value in vars(cache).items() if not name.startswith("_")}
    methods = {
        name: typing.get_type_hints(getattr(method, "fget", method)).get("return")
        for name, method in vars(TieredCache).items()
        if not name.startswith("_") and callable(getattr(method, "fget", method))
    }
    plain = {int, float, bool, str, type(None)}

    assert public <= {CacheConfig, int}
    assert {name: kind for name, kind in methods.items() if kind in private - plain} == {}
