"""Trees with and without git for tests of code bundles."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Mapping
from pathlib import Path

from launcher.bundle import fetch, make_bundle, upload
from launcher.bundle_files import find_tree
from launcher.storage import Storage

GIT_ENV = {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    **{f"GIT_{who}_{what}": "t@example.com" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
}


def git(folder: Path, *arguments: str) -> str:
    """One git command in a repository that knows no settings of this machine."""
    argv = ["git", "-c", "protocol.file.allow=always", "-C", str(folder), *arguments]
    done = subprocess.run(argv, env={**os.environ, **GIT_ENV}, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def write(folder: Path, files: Mapping[str, str | bytes]) -> None:
    """Files by their relative names."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)


def small_tree(folder: Path) -> Path:
    """A file, a program in a folder, an empty file and a link, without git."""
    write(folder, {"a.py": "print(1)\n", "sub/run.sh": "#!/bin/sh\n", "empty": ""})
    (folder / "sub" / "run.sh").chmod(0o755)
    (folder / "link").symlink_to("sub/run.sh")
    return folder


def repository(folder: Path, files: Mapping[str, str | bytes]) -> Path:
    """A repository with one commit of ``files``."""
    folder.mkdir(parents=True, exist_ok=True)
    git(folder, "init", "--quiet", "--initial-branch=main")
    write(folder, files)
    git(folder, "add", "--all", "--force")
    git(folder, "commit", "--quiet", "--allow-empty", "--message", "first")
    return folder


def names(folder: Path) -> list[str]:
    """What a bundle of the tree around ``folder`` holds."""
    return [source.name for source in find_tree(folder).files]


def skipped(folder: Path) -> dict[str, str]:
    """What a bundle leaves out and says so."""
    return {entry.name: entry.reason for entry in make_bundle(folder).skipped}


def write_raw(folder: Path, name: bytes, content: bytes) -> None:
    """A file whose name need not be text."""
    path = os.path.join(os.fsencode(folder), name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(content)


def content_of(folder: Path) -> dict[bytes, tuple[str, bytes]]:
    """Everything below a folder but its own .git: kind (with the executable bit) and content."""
    found: dict[bytes, tuple[str, bytes]] = {}
    top = os.fsencode(folder)
    for parent, folders, files in os.walk(top):
        folders[:] = [name for name in folders if name != b".git"]
        for name in (*files, *(name for name in folders if os.path.islink(os.path.join(parent, name)))):
            path = os.path.join(parent, name)
            mode = os.lstat(path).st_mode
            if stat.S_ISLNK(mode):
                found[os.path.relpath(path, top)] = "link", os.readlink(path)
            else:
                with open(path, "rb") as file:
                    found[os.path.relpath(path, top)] = "program" if mode & 0o100 else "file", file.read()
    return found


def round_trip(folder: Path, storage: Storage, into: Path) -> Path:
    """Made, uploaded and fetched."""
    bundle = make_bundle(folder)
    upload(storage, bundle)
    return fetch(storage, bundle.digest, into)
