"""What the project promises of its own files: sizes, banned calls, ASCII, locks, links, the wheel.

pytest tests/unit/test_project.py
"""

from __future__ import annotations

import ast
import re
import shutil
import statistics
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPO = Path(__file__).resolve().parents[2]
PACKAGES = ("recipes", "launcher", "trainer")
FOLDERS = (*PACKAGES, "tests", "benchmarks", "scripts", "docs", "k8s", "terraform", ".ci")
TEXT_SUFFIXES = {
    "",
    ".py",
    ".md",
    ".yaml",
    ".yml",
    ".json",
    ".toml",
    ".sh",
    ".lock",
    ".csv",
    ".tf",
    ".txt",
    ".cff",
}
MAX_FILE_LINES = 600
MAX_MEDIAN_LINES = 200
MAX_FUNCTION_LINES = 60
LOCKS = (
    "requirements-build.lock",
    "requirements.lock",
    "requirements-dev.lock",
    "k8s/requirements-tpu.lock",
)


def text_files() -> list[Path]:
    files = [path for path in REPO.iterdir() if path.is_file() and not path.name.startswith(".git")]
    for folder in FOLDERS:
        files += [path for path in (REPO / folder).rglob("*") if path.is_file()]
    return sorted(p for p in files if p.suffix in TEXT_SUFFIXES and "__pycache__" not in p.parts)


def python_files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((REPO / folder).rglob("*.py"))]


CODE = python_files(*PACKAGES, "tests", "benchmarks")


def shown(path: Path) -> str:
    return str(path.relative_to(REPO))


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=shown(path))


# Sizes


def test_files_are_small() -> None:
    lines = {shown(path): len(path.read_text(encoding="utf-8").splitlines()) for path in CODE}
    assert not {name: count for name, count in lines.items() if count > MAX_FILE_LINES}
    assert statistics.median(lines.values()) <= MAX_MEDIAN_LINES


def test_functions_are_small() -> None:
    too_long = [
        f"{shown(path)}:{node.lineno} {node.name} has {node.end_lineno - node.lineno + 1} lines"
        for path in CODE
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
    ]
    assert not too_long


def test_modules_have_docstrings() -> None:
    assert not [shown(path) for path in python_files(*PACKAGES) if not ast.get_docstring(parsed(path))]


# Banned calls and imports

BANNED_CALLS = {
    "eval", "exec", "os.system", "os.popen", "yaml.load", "yaml.full_load", "yaml.unsafe_load", "hydra.main",
    "instantiate", "hydra.utils.instantiate", "hydra.utils.call",
}  # fmt: skip
BANNED_IMPORTS = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "commands"}
BANNED_TRUE_KEYWORDS = {"shell", "allow_pickle"}


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def banned_in_import(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    if isinstance(node, ast.Import):
        modules = [alias.name for alias in node.names]
    else:
        modules = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
    yield from (m for m in modules if m.split(".")[0] in BANNED_IMPORTS or m in BANNED_CALLS)


def banned_in_call(node: ast.Call) -> Iterator[str]:
    if dotted(node.func) in BANNED_CALLS:
        yield dotted(node.func)
    for keyword in node.keywords:
        allowed = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
        if keyword.arg in BANNED_TRUE_KEYWORDS and not allowed:
            yield f"{keyword.arg}="


def banned(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((node.lineno, what) for what in banned_in_import(node))
        elif isinstance(node, ast.Call):
            yield from ((node.lineno, what) for what in banned_in_call(node))


def test_nothing_banned_is_called() -> None:
    assert not [f"{shown(path)}:{line}: {what}" for path in CODE for line, what in banned(parsed(path))]


@pytest.mark.parametrize(
    "source",
    [
        "eval(text)",
        "exec(text)",
        "os.system(command)",
        "subprocess.run(command, shell=True)",
        "subprocess.run(command, shell=wanted)",
        "import pickle",
        "from pickle import loads",
        "numpy.load(path, allow_pickle=True)",
        "yaml.load(text, Loader=loader)",
        "from yaml import load",
        "from hydra.utils import instantiate",
        "hydra.utils.instantiate(config)",
        "hydra.main(version_base=None)",
    ],
)
def test_the_banned_are_recognized(source: str) -> None:
    assert list(banned(ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    [
        "ast.literal_eval(text)",
        "re.compile(text)",
        "subprocess.run(argv, shell=False)",
        "yaml.safe_load(text)",
    ],
)
def test_their_harmless_likes_are_not(source: str) -> None:
    assert not list(banned(ast.parse(source)))


# Text


def test_text_is_ascii() -> None:
    not_ascii = []
    for path in text_files():
        for number, line in enumerate(path.read_bytes().splitlines(), start=1):
            if not line.isascii():
                not_ascii.append(f"{shown(path)}:{number}")
    assert not not_ascii


MARKDOWN = sorted(
    [
        *REPO.glob("*.md"),
        *(REPO / "docs").rglob("*.md"),
        *(REPO / "benchmarks").rglob("*.md"),
        *(REPO / "k8s").rglob("*.md"),
    ]
)
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)


def anchors(markdown: str) -> set[str]:
    headings = re.findall(r"^#+ +(.*)$", FENCE.sub("", markdown), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def broken_links(path: Path) -> Iterator[str]:
    for link in LINK.findall(FENCE.sub("", path.read_text(encoding="utf-8"))):
        if "://" in link or link.startswith("mailto:"):
            continue
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        missing_anchor = anchor and target.suffix == ".md" and target.is_file()
        if not target.exists() or (
            missing_anchor and anchor not in anchors(target.read_text(encoding="utf-8"))
        ):
            yield f"{shown(path)}: {link}"


def test_links_between_documents_resolve() -> None:
    assert MARKDOWN
    assert not [link for path in MARKDOWN for link in broken_links(path)]


def test_contributing_is_short() -> None:
    assert len((REPO / "CONTRIBUTING.md").read_text(encoding="utf-8").splitlines()) < 60


# Dependencies and locks

PYPROJECT = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))
RUNTIME = [Requirement(text) for text in PYPROJECT["project"]["dependencies"]]
EXTRAS = {
    extra: [Requirement(text) for text in texts]
    for extra, texts in PYPROJECT["project"]["optional-dependencies"].items()
}
BUILD = [Requirement(text) for text in PYPROJECT["build-system"]["requires"]]


def names(requirements: list[Requirement]) -> list[str]:
    return sorted(requirement.name for requirement in requirements)


def documented(heading: str) -> list[str]:
    text = (REPO / "docs" / "dependencies.md").read_text(encoding="utf-8")
    section = text.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = [row for row in section.splitlines() if row.startswith("| ")]
    return sorted(row.split("|")[1].strip() for row in rows[1:])


@pytest.mark.parametrize(
    ("heading", "requirements"),
    [
        ("Runtime", RUNTIME),
        ("Extra: `tpu`", EXTRAS["tpu"]),
        ("Extra: `dev`", EXTRAS["dev"]),
        ("Building", BUILD),
    ],
)
def test_every_dependency_has_a_reason(heading: str, requirements: list[Requirement]) -> None:
    assert documented(heading) == names(requirements)


def modules_of(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module or ""


def imported(*folders: str) -> dict[str, str]:
    """Third-party top-level module -> a file that imports it."""
    ours = {*sys.stdlib_module_names, *PACKAGES}
    return {
        top: shown(path)
        for path in python_files(*folders)
        for top in (module.split(".")[0] for module in modules_of(parsed(path)))
        if top not in ours
    }


def test_recipes_import_the_standard_library_only() -> None:
    assert not imported("recipes")


def test_runtime_dependencies_are_those_imported() -> None:
    providers = {
        module: {canonicalize_name(d) for d in dists} for module, dists in packages_distributions().items()
    }
    declared = {canonicalize_name(requirement.name) for requirement in RUNTIME}
    used = imported("launcher", "trainer")
    assert not {m: path for m, path in used.items() if not providers[m] & declared}, "not in pyproject.toml"
    assert not declared - {dist for module in used for dist in providers[module]}, "never imported"


def locked(name: str) -> dict[str, tuple[str, int]]:
    """Distribution -> its pinned version and how many hashes follow."""
    pins: dict[str, tuple[str, int]] = {}
    for block in re.split(r"\n(?=\S)", (REPO / name).read_text(encoding="utf-8")):
        if match := re.match(r"([A-Za-z0-9._-]+)==(\S+)", block):
            pins[canonicalize_name(match[1])] = (
                match[2],
                len(re.findall(r"--hash=sha256:[0-9a-f]{64}\b", block)),
            )
        else:
            assert block.startswith("#"), f"{name}: neither a pin nor a comment: {block}"
    return pins


@pytest.mark.parametrize("name", LOCKS)
def test_every_pin_is_hashed(name: str) -> None:
    assert locked(name)
    assert not [pin for pin, (_, num_hashes) in locked(name).items() if num_hashes == 0]


@pytest.mark.parametrize("name", LOCKS)
def test_locks_name_no_host(name: str) -> None:
    text = (REPO / name).read_text(encoding="utf-8")
    assert not re.findall(
        r"://|--index|--extra-index|--find-links|--trusted|\b[\w-]+\.(?:org|com|net|io|dev)\b", text
    )


@pytest.mark.parametrize(
    ("name", "requirements"),
    [
        ("requirements-build.lock", BUILD),
        ("requirements.lock", RUNTIME),
        ("requirements-dev.lock", [*RUNTIME, *EXTRAS["dev"]]),
    ],
)
def test_locks_follow_the_project(name: str, requirements: list[Requirement]) -> None:
    """A lock that was not written anew after pyproject.toml changed; scripts/lock.sh mends it."""
    pins = locked(name)
    stale = [
        str(r)
        for r in requirements
        if not r.specifier.contains(pins.get(canonicalize_name(r.name), ("0", 0))[0])
    ]
    assert not stale


def test_both_locks_pin_the_same_versions() -> None:
    runtime, dev = locked("requirements.lock"), locked("requirements-dev.lock")
    assert {name: dev.get(name) for name in runtime} == runtime


def test_one_python_floor() -> None:
    floor = (REPO / ".python-version").read_text(encoding="utf-8").strip()
    assert PYPROJECT["project"]["requires-python"] == f">={floor}"
    assert PYPROJECT["tool"]["mypy"]["python_version"] == floor
    assert PYPROJECT["tool"]["ruff"]["target-version"] == f"py{floor.replace('.', '')}"


# The wheel


def test_the_wheel_carries_code_and_data(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for package in PACKAGES:
        shutil.copytree(REPO / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPO / name, source / name)
    pip = [
        sys.executable,
        "-I",
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
    ]
    built = subprocess.run(
        [*pip, "--wheel-dir", tmp_path, source], capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("muster_tpu-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        carried = {name for name in archive.namelist() if not name.startswith("muster_tpu-")}
        (entry_points,) = (name for name in archive.namelist() if name.endswith("/entry_points.txt"))
        assert "muster = launcher.cli:main" in archive.read(entry_points).decode()
    expected = {
        shown(path)
        for package in PACKAGES
        for path in (REPO / package).rglob("*")
        if path.suffix in {".py", ".yaml", ".json", ".sh"} or path.name == "py.typed"
    }
    assert carried == expected
