"""Which files go to the hosts: the working tree around a folder, as git sees it, without secrets.

In a git repository: tracked files with their present content, untracked ones that no .gitignore
excludes, and checked-out submodules likewise. Elsewhere: everything below the folder but hidden
folders, ``__pycache__`` and virtual environments. See docs/code.md.
"""

from __future__ import annotations

import enum
import fnmatch
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.git import git, head
from launcher.text import printable
from recipes.contract import BUNDLES, RunPath
from recipes.errors import UserError

MAX_FILES = 50_000
"""More is data, or the wrong folder."""
SHOWN_CHARS = 160
KERNEL_FOLDERS = ("/proc", "/sys", "/dev")

SECRET_FOLDERS = (".aws", ".azure", ".docker", ".gnupg", ".kube", ".ssh", "gcloud")
SECRET_NAMES = (
    *(".env", ".env.*", "*.env", ".envrc", ".netrc", "_netrc", ".pgpass", ".my.cnf", ".htpasswd"),
    *(".git-credentials", ".npmrc", ".pypirc", ".dockerconfigjson", ".dockercfg"),
    *("*.pem", "*.key", "*.p12", "*.pfx", "*.jks", "*.keystore", "*.kdbx", "*.ppk"),
    *("id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*"),
    *("kubeconfig", "kubeconfig.*", "*.kubeconfig", "*.tfstate", "*.tfstate.backup"),
    *("*credentials*.json", "*service-account*.json", "*service_account*.json", "*serviceaccount*.json"),
    *("*client_secret*.json", "*client-secret*.json", "secrets.json", "secrets.yaml", "secrets.yml"),
    *("*_token", "*.token"),
)
"""Of files that hold a secret by custom; compared in lower case."""
HARMLESS_SUFFIXES = (".example", ".sample", ".template", ".pub")
_SECRET = re.compile("|".join(map(fnmatch.translate, SECRET_NAMES)))
_GITLINK = b"160000"


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One file or link of the tree."""

    name: str
    """Relative to the root, with ``/``."""
    size_bytes: int
    executable: bool
    link: str | None
    """Where a symbolic link points to; None for a file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Skipped:
    """Something of the tree that is not sent, and why."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{shown(self.name)}: {self.reason}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Tree:
    """What would be sent."""

    root: Path
    files: Sequence[Source]
    """By name, in the order of bytes."""
    skipped: Sequence[Skipped]
    commit: str | None
    """None outside git and before the first commit."""
    dirty: bool | None
    """Whether it differs from the commit; None outside git."""


class _Known(enum.Enum):
    """What git has of a file."""

    COMMITTED = "committed"
    CHANGED = "changed"
    UNTRACKED = "untracked"


def find_tree(folder: Path) -> Tree:
    """The working tree around ``folder``.

    Raises:
      UserError: it cannot be read, has too many files, or has a secret in an uncommitted change.
    """
    folder = Path(os.path.realpath(folder))
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}", hint="start in the folder with the code")
    skipped: list[Skipped] = []
    if not any(os.path.lexists(parent / ".git") for parent in (folder, *folder.parents)):
        _check_is_code(folder)
        names = dict.fromkeys(_below(folder), _Known.UNTRACKED)
        files = _sources(folder, names, skipped)
        return Tree(root=folder, files=files, skipped=tuple(skipped), commit=None, dirty=None)
    root = Path(os.fsdecode(git(folder, "rev-parse", "--show-toplevel").removesuffix(b"\n")))
    listing = _Listing(skipped)
    commit = listing.add(root, "")
    files = _sources(root, listing.names, skipped)
    return Tree(root=root, files=files, skipped=tuple(skipped), commit=commit, dirty=listing.dirty)


def _check_is_code(folder: Path) -> None:
    """Refuses folders outside git that hold everything else too."""
    kernels = [Path(each) for each in KERNEL_FOLDERS]
    is_home = folder == Path(os.path.realpath(os.path.expanduser("~")))
    if folder == Path(folder.anchor) or is_home or any(folder.is_relative_to(each) for each in kernels):
        raise UserError(
            f"the code of this launch would be all of {shown(str(folder))}",
            hint="start in the folder with the code, or set target.ship_code=false",
        )


def shown(name: str) -> str:
    """A file's name on one line of a message, whatever is in it."""
    text = printable(name).replace("\n", "\\n").replace("\t", "\\t")
    return text if len(text) <= SHOWN_CHARS else f"{text[: SHOWN_CHARS // 2]}...{text[-SHOWN_CHARS // 2 :]}"


def looks_secret(name: str) -> bool:
    """Whether a file is one that holds a secret by custom."""
    *folders, base = name.lower().split("/")
    if base.endswith(HARMLESS_SUFFIXES):
        return False
    return _SECRET.match(base) is not None or any(part in SECRET_FOLDERS for part in folders)


class _Listing:
    """Names that git gives, of a repository and its submodules."""

    def __init__(self, skipped: list[Skipped]) -> None:
        self.names: dict[str, _Known] = {}
        self.dirty = False
        self._skipped = skipped

    def add(self, root: Path, prefix: str) -> str | None:
        """Takes in one repository, whose own place in the whole tree is ``prefix``; gives its commit."""
        commit = head(root)
        changed = _changed(root) if commit else None
        self.dirty |= changed is None or bool(changed)
        listing = git(root, "ls-files", "-z", "-t", "--stage", "--cached", "--others", "--exclude-standard")
        for entry in listing.split(b"\0")[:-1]:
            tag, _, rest = entry.partition(b" ")
            if tag == b"?":
                self._add_untracked(prefix + os.fsdecode(rest))
                continue
            facts, _, path = rest.partition(b"\t")
            name = os.fsdecode(path)
            if facts.startswith(_GITLINK):
                self._add_submodule(root / name, prefix + name)
            else:
                is_changed = changed is None or name in changed
                self.names[prefix + name] = _Known.CHANGED if is_changed else _Known.COMMITTED
        return commit

    def _add_untracked(self, name: str) -> None:
        self.dirty = True
        if name.endswith("/"):
            self._skipped.append(Skipped(name=name, reason="another git repository"))
        else:
            self.names[name] = _Known.UNTRACKED

    def _add_submodule(self, folder: Path, name: str) -> None:
        if os.path.lexists(folder / ".git"):
            self.add(folder, f"{name}/")
        else:
            self._skipped.append(Skipped(name=name, reason="a submodule that is not checked out"))


def _changed(root: Path) -> set[str]:
    """Tracked names that differ from the commit: in the index, in the working tree, or gone."""
    options = ("--porcelain=v1", "-z", "--no-renames", "--untracked-files=no", "--ignore-submodules=none")
    listing = git(root, "status", *options)
    return {os.fsdecode(entry[len(b"XY ") :]) for entry in listing.split(b"\0")[:-1]}


def _below(folder: Path) -> Iterator[str]:
    """Files and links below a folder that git does not know."""
    num_files = 0
    for parent, folders, files in os.walk(folder, onerror=_raise):
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        folders[:] = [name for name in folders if name not in links and not _is_hidden(parent, name)]
        for name in (*files, *links):
            yield os.path.relpath(os.path.join(parent, name), folder)
        num_files += len(files)
        if num_files > MAX_FILES:
            return


def _is_hidden(parent: str, name: str) -> bool:
    path = os.path.join(parent, name)
    environment = any(os.path.lexists(os.path.join(path, mark)) for mark in ("pyvenv.cfg", "conda-meta"))
    return name.startswith(".") or name == "__pycache__" or environment


def _raise(error: OSError) -> None:
    raise _unreadable(str(error.filename), error) from error


def _unreadable(path: str, error: OSError) -> UserError:
    return UserError(f"cannot read {shown(path)}: {error.strerror}", hint="make it readable, or move it away")


def _sources(root: Path, names: Mapping[str, _Known], skipped: list[Skipped]) -> Sequence[Source]:
    """The files that ``names`` stand for now; what is gone is left out silently, as a commit would."""
    if len(names) > MAX_FILES:
        raise UserError(
            f"{root} has more than {MAX_FILES:,} files to send to the hosts",
            hint="start in the folder with the code, and name what hosts do not need in .gitignore",
        )
    runs = _runs(names)
    real: dict[str, bool] = {"": True}
    files: list[Source] = []
    for name in sorted(names, key=os.fsencode):
        if names[name] is _Known.UNTRACKED and _is_result(name, runs):
            continue
        reason = _why_secret(name, names[name])
        if reason:
            skipped.append(Skipped(name=name, reason=reason))
        elif _is_real(root, name.rpartition("/")[0], real):
            source = _source(root, name, skipped)
            files += [source] if source else []
    return tuple(files)


def _runs(names: Mapping[str, _Known]) -> set[str]:
    """Run directories inside the tree: results, not code."""
    lock = f"/{RunPath.LOCK}"
    folders = {name.removesuffix(lock) for name in names if name.endswith(lock)}
    return {folder for folder in folders if f"{folder}/{RunPath.RECIPE}" in names}


def _is_result(name: str, runs: set[str]) -> bool:
    parts = name.split("/")
    return BUNDLES in parts[:-1] or any("/".join(parts[:count]) in runs for count in range(1, len(parts)))


def _why_secret(name: str, known: _Known) -> str:
    if known is _Known.COMMITTED or not looks_secret(name):
        return ""
    if known is _Known.CHANGED:
        raise UserError(
            f"{shown(name)} looks like a secret, and git tracks it with changes that are not committed",
            hint="commit it if it holds no secret; else `git rm --cached` it and name it in .gitignore",
        )
    return "looks like a secret"


def _is_real(root: Path, folder: str, known: dict[str, bool]) -> bool:
    """Whether no part of a folder's path is a link: what lies behind one is not this tree's."""
    if folder not in known:
        parent = folder.rpartition("/")[0]
        known[folder] = _is_real(root, parent, known) and not os.path.islink(root / folder)
    return known[folder]


def _source(root: Path, name: str, skipped: list[Skipped]) -> Source | None:
    path = os.path.join(root, name)
    try:
        status = os.lstat(path)
        link = os.readlink(path) if stat.S_ISLNK(status.st_mode) else None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _unreadable(path, error) from error
    if link is not None:
        if not _points_inside(root, name, link):
            skipped.append(Skipped(name=name, reason="a link out of the tree"))
            return None
        return Source(name=name, size_bytes=0, executable=False, link=link)
    if stat.S_ISDIR(status.st_mode):
        return None
    if not stat.S_ISREG(status.st_mode):
        skipped.append(Skipped(name=name, reason="neither a file nor a link"))
        return None
    return Source(
        name=name, size_bytes=status.st_size, executable=bool(status.st_mode & stat.S_IXUSR), link=None
    )


def _points_inside(root: Path, name: str, link: str) -> bool:
    """Read as text and followed: both must stay inside, or it would mean something else on a host."""
    folder = os.path.dirname(name)
    text = os.path.normpath(os.path.join(folder, link))
    real_root = os.path.realpath(root)
    real = os.path.realpath(os.path.join(real_root, name))
    inside = os.path.commonpath([real_root, real]) == real_root
    return inside and not os.path.isabs(link) and text.split("/")[0] != ".."
