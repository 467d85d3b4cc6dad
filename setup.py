"""Builds the two compiled modules; everything else about the package is in pyproject.toml.

Switches, all environment variables:

LQS_EXTENSIONS=0          leave out the compiled modules, for an editable install that builds them in place later
LQS_NATIVE=0              leave out -march=native, for a wheel that other machines will run
LQS_DEBUG=1               bounds checks and asserts on, optimiser off
LQS_COVERAGE=1            line tracing for coverage.py, generated C beside its source
LQS_ANNOTATE=1            write an HTML page beside each generated file; what is yellow calls Python
LQS_SANITIZE=address      AddressSanitizer and UndefinedBehaviorSanitizer
LQS_SANITIZE=thread       ThreadSanitizer
"""

import os
from glob import glob
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

EXTENSIONS = os.environ.get("LQS_EXTENSIONS", "1") == "1"
NATIVE = os.environ.get("LQS_NATIVE", "1") == "1"
DEBUG = os.environ.get("LQS_DEBUG", "0") == "1"
COVERAGE = os.environ.get("LQS_COVERAGE", "0") == "1"
ANNOTATE = os.environ.get("LQS_ANNOTATE", "0") == "1"
SANITIZE = os.environ.get("LQS_SANITIZE", "")

SANITIZERS = {"": [], "address": ["-fsanitize=address,undefined"], "thread": ["-fsanitize=thread"]}
# A library of llama-cpp-python is linked by its versioned name: a wheel holds copies, not symlinks,
# and the unversioned copy would be mapped a second time.
LLAMA_LIBRARIES = ("libllama.so.0", "libggml.so.0", "libggml-base.so.0")
# A compiled module is built again when any of these is newer than it.
HEADERS = sorted(name for kind in ("pxd", "pxi", "h", "hpp") for name in glob(f"lqs/**/*.{kind}", recursive=True))
# One folder per kind of build, so that no kind takes another's objects for its own.
BUILD_BASE = "build/" + (
    "-".join(filter(None, (SANITIZE, "debug" * DEBUG, "coverage" * COVERAGE, "annotate" * ANNOTATE))) or "release"
)


def optimisation() -> list[str]:
    if SANITIZE:
        return ["-O1"]
    if DEBUG or COVERAGE:
        return ["-O0"]
    # What is built here runs here; llama.cpp's own build assumes the same.
    return ["-O3", "-march=native"] if NATIVE else ["-O3"]


def switches() -> dict[str, list]:
    """Compiler and linker settings that both modules share."""
    tracing = [("CYTHON_TRACE_NOGIL", "1"), ("CYTHON_USE_SYS_MONITORING", "0")] if COVERAGE else []
    symbols = ["-g", "-fno-omit-frame-pointer"] if SANITIZE or DEBUG else []
    return {
        "include_dirs": ["lqs"],
        "define_macros": tracing,
        "undef_macros": ["NDEBUG"] if SANITIZE or DEBUG else [],
        "extra_compile_args": [*optimisation(), *symbols, *SANITIZERS[SANITIZE]],
        "extra_link_args": list(SANITIZERS[SANITIZE]),
        "depends": ["setup.py", *HEADERS],
    }


def core() -> Extension:
    settings = switches()
    settings["extra_compile_args"].insert(0, "-std=c11")
    return Extension("lqs._core", ["lqs/_core.pyx"], **settings)


def engine() -> Extension:
    """The module over libllama, compiled against the very build of it that runs."""
    # Found, not imported: importing llama_cpp loads libllama into the build.
    spec = find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        raise SystemExit("lqs._engine needs llama-cpp-python to compile against; `pip install .` brings it")
    llama = Path(spec.origin).parent
    settings = switches()
    settings["include_dirs"].append(str(llama.parent / "include"))
    settings["depends"].append(str(llama.parent / "include" / "llama.h"))
    settings["define_macros"].append(("LQS_LLAMA_CPP_PYTHON", f'"{version("llama-cpp-python")}"'))
    settings["extra_compile_args"].insert(0, "-std=c++17")
    settings["extra_link_args"] += [f"-L{llama / 'lib'}", *(f"-l:{name}" for name in LLAMA_LIBRARIES)]
    return Extension(
        "lqs._engine",
        ["lqs/_engine.pyx"],
        language="c++",
        runtime_library_dirs=["$ORIGIN/../llama_cpp/lib"],
        **settings,
    )


class BuildExt(build_ext):
    """Adds llama_cpp's folder by its full name where the module is not installed beside it."""

    def run(self) -> None:
        if self.inplace or getattr(self, "editable_mode", False):
            for ext in self.extensions:
                ext.runtime_library_dirs += [arg[2:] for arg in ext.extra_link_args if arg.startswith("-L")]
        super().run()


def extensions() -> list[Extension]:
    if not EXTENSIONS:
        return []
    builders = {"lqs/_core.pyx": core, "lqs/_engine.pyx": engine}
    return cythonize(
        [build() for source, build in builders.items() if Path(source).exists()],
        # coverage.py reads the generated C and wants it beside its source.
        build_dir=None if COVERAGE else f"{BUILD_BASE}/cython",
        # Here and not in the files: what a file's first lines say could not be switched for a debug build.
        annotate=ANNOTATE,
        compiler_directives={
            "language_level": 3,
            "linetrace": COVERAGE,
            "boundscheck": DEBUG,
            "wraparound": False,
            "initializedcheck": DEBUG,
            "cdivision": not DEBUG,
            "auto_pickle": False,
            "autotestdict": False,
            "embedsignature": True,
        },
    )


setup(
    ext_modules=extensions(),
    cmdclass={"build_ext": BuildExt},
    options={"build": {"build_base": BUILD_BASE}},
)
