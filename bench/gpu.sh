#!/usr/bin/env bash
# lqs on an NVIDIA GPU: the gpu tests, then bench.compare beside llama-server, on models of 1B and 8B shape with
# random weights. The machine needs no network: what it lacks is made beforehand and brought along.
#
#   bench/gpu.sh --make-build DIR [--arch 90] [--python 3.12]    on any machine with nvcc and a network; no GPU needed
#   bench/gpu.sh --build DIR [--out DIR] [--full]                on the machine with the GPU
#   bench/gpu.sh --source FILE.tar.xz [--arch 90] ...            the same, llama.cpp compiled there (16 cores: 3 minutes)
#   bench/gpu.sh --cpu [--peer PATH] [--out DIR]                 the same steps without a GPU, on small shapes
#
# --make-build leaves DIR/site (llama_cpp with its CUDA libraries), DIR/bin/llama-server, DIR/wheels (what Python needs
# besides, for that version of it), DIR/source.tar.xz (the sources of llama.cpp, stripped, for --source), and DIR.tar.xz.
# It takes 20 minutes on two cores for one architecture: 90 is Hopper, 89 Ada, 86 Ampere (RTX 30), 80 A100.
#
# The run wants python3 with its headers, a C++ compiler, the CUDA runtime and cuBLAS of the same major version, and
# 25 GB of disk for the models. It aims at 10 minutes on 16 cores and says what each step took. It writes into --out
# (build/gpu by default): report.txt, compare-*.json and the log of each step. A step that fails is told, and the rest
# goes on; the exit code is then 1.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
mode= folder= arch=90 python_version=3.12 out="$here/build/gpu" peer= full=0
cores=$(nproc)

usage() { sed -n '2,/^set -euo/p' "${BASH_SOURCE[0]}" | sed '$d; s/^# \{0,1\}//'; exit "$1"; }

while [ $# -gt 0 ]; do
    case "$1" in
        --make-build | --build | --source) mode=${1#--}; folder=${2:?"$1 wants a path"}; shift 2 ;;
        --cpu) mode=cpu; shift ;;
        --arch) arch=${2:?}; shift 2 ;;
        --python) python_version=${2:?}; shift 2 ;;
        --out) out=${2:?}; shift 2 ;;
        --peer) peer=${2:?}; shift 2 ;;
        --full) full=1; shift ;;
        -h | --help) usage 0 ;;
        *) echo "gpu.sh: $1 is no flag" >&2; usage 2 >&2 ;;
    esac
done
[ -n "$mode" ] || usage 2 >&2

version=$(sed -n 's/.*"llama-cpp-python==\([0-9.]*\)".*/\1/p' "$here/pyproject.toml" | head -1)
say() { echo "gpu.sh: $*"; }
fail() { echo "gpu.sh: $*" >&2; exit 1; }

# --- llama.cpp with CUDA, for one architecture -------------------------------------------------------------------

# compile_llama SOURCE OUT: SOURCE is the vendored llama.cpp. No NCCL and no VMM: fewer libraries to bring along.
# What is linked with libggml-cuda has no path to cuBLAS, so the linker is told where that lies.
compile_llama() {
    cmake -S "$1" -B "$2" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON \
        -DGGML_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES="$arch" -DGGML_CUDA_NO_VMM=ON -DGGML_CUDA_NCCL=OFF -DGGML_NATIVE=OFF \
        -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_CURL=OFF \
        -DCMAKE_EXE_LINKER_FLAGS="-Wl,-rpath-link,${CUDA_HOME:-/usr/local/cuda}/lib64" \
        -DCMAKE_INSTALL_RPATH="\$ORIGIN;\$ORIGIN/../site/llama_cpp/lib" -DCMAKE_BUILD_WITH_INSTALL_RPATH=ON
    cmake --build "$2" --target llama llama-server -j "$cores"
}

# lay_out SOURCE OUT SITE: the package as pip installs it, with these libraries. Links become copies, as in a wheel.
lay_out() {
    local sdist=$1 built=$2 into=$3
    mkdir -p "$into/site/llama_cpp/lib" "$into/bin"
    cp -r "$sdist/llama_cpp/." "$into/site/llama_cpp/"
    find "$built" -name 'lib*.so*' -exec cp -L {} "$into/site/llama_cpp/lib/" \;
    strip --strip-unneeded "$into"/site/llama_cpp/lib/*.so*
    cp "$built/bin/llama-server" "$into/bin/" && strip "$into/bin/llama-server"
    mkdir -p "$into/site/include" "$into/site/llama_cpp_python-$version.dist-info"
    cp "$sdist"/vendor/llama.cpp/include/*.h "$sdist"/vendor/llama.cpp/ggml/include/*.h "$into/site/include/"
    printf 'Metadata-Version: 2.1\nName: llama-cpp-python\nVersion: %s\n' "$version" \
        > "$into/site/llama_cpp_python-$version.dist-info/METADATA"
}

# A bare toolkit has no cuBLAS: its headers and libraries come as a wheel and are laid over a copy of the toolkit. A copy,
# because nvcc follows links to where it really is and would look there.
toolkit_with_cublas() {
    local cuda=${CUDA_HOME:-/usr/local/cuda} into=$1 release library
    if [ -e "$cuda/include/cublas_v2.h" ]; then
        echo "$cuda"
        return
    fi
    # Made by a run that was broken off: newer headers would compile everything anew.
    if [ -e "$into/cuda/include/cublas_v2.h" ] && [ -e "$into/cuda/lib64/libcublas.so" ]; then
        echo "$into/cuda"
        return
    fi
    release=$("$cuda/bin/nvcc" --version | sed -n 's/.*release \([0-9]*\.[0-9]*\).*/\1/p')
    python3 -m pip -q download --no-deps -d "$into/cublas" "nvidia-cublas==$release.*" >&2
    (cd "$into/cublas" && python3 -m zipfile -e nvidia_cublas-*.whl .)
    rm -rf "$into/cuda" && cp -a "$(realpath "$cuda")" "$into/cuda"
    find "$into/cublas" -path '*include/*' -name '*.h' -exec cp --remove-destination {} "$into/cuda/include/" \;
    while read -r library; do
        cp --remove-destination "$library" "$into/cuda/lib64/"
        # The linker wants the name without its version.
        ln -sf "$(basename "$library")" "$into/cuda/lib64/$(basename "$library" | sed 's/\.so.*/.so/')"
    done < <(find "$into/cublas" -name 'libcublas*.so*')
    echo "$into/cuda"
}

make_build() {
    local work="$folder/work" sdist began=$SECONDS
    command -v cmake > /dev/null || fail "cmake is missing"
    mkdir -p "$work" "$folder/wheels"
    say "fetching the sources of llama-cpp-python $version"
    python3 -m pip -q download --no-deps --no-binary :all: -d "$work" "llama-cpp-python==$version"
    tar -xf "$work/llama_cpp_python-$version.tar.gz" -C "$work"
    sdist="$work/llama_cpp_python-$version"
    rm -rf "$sdist/vendor/llama.cpp/models" "$sdist/vendor/llama.cpp/docs" "$sdist"/vendor/llama.cpp/media
    tar -cJf "$folder/source.tar.xz" -C "$work" "llama_cpp_python-$version"
    CUDA_HOME=$(toolkit_with_cublas "$work")
    export CUDA_HOME PATH="$CUDA_HOME/bin:$PATH" CUDACXX="$CUDA_HOME/bin/nvcc"
    export CUDAToolkit_ROOT="$CUDA_HOME"
    say "compiling for sm_$arch with $cores cores"
    compile_llama "$sdist/vendor/llama.cpp" "$work/out"
    lay_out "$sdist" "$work/out" "$folder"
    say "fetching wheels for Python $python_version"
    # shellcheck disable=SC2046
    python3 -m pip -q download --only-binary :all: --python-version "$python_version" --implementation cp \
        --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
        -d "$folder/wheels" $(needed)
    tar -cJf "$folder.tar.xz" -C "$(dirname "$folder")" --exclude="$(basename "$folder")/work" \
        --exclude="$(basename "$folder")/source.tar.xz" "$(basename "$folder")"
    say "made in $((SECONDS - began)) s:"
    du -sh "$folder.tar.xz" "$folder/source.tar.xz" "$folder/site/llama_cpp/lib/libggml-cuda.so"
    try_without_a_gpu
}

# How far it gets here: every library but the driver's is found, and llama.cpp comes up and knows that it could use a GPU.
try_without_a_gpu() {
    local libraries="$folder/site/llama_cpp/lib" python="$here/.venv/bin/python"
    [ -x "$python" ] || python=python3
    export LD_LIBRARY_PATH="$libraries:$CUDA_HOME/lib64:${LD_LIBRARY_PATH:-}"
    ldd "$libraries/libggml-cuda.so" | awk '/not found/ {print "gpu.sh: not here:", $1}'
    PYTHONPATH="$folder/site" "$python" -c '
import llama_cpp
print("gpu.sh: llama.cpp", llama_cpp.__version__, "loads; offers a GPU:", llama_cpp.llama_supports_gpu_offload())
print("gpu.sh:", llama_cpp.llama_print_system_info().decode())' || say "it does not load here, see above"
}

# What Python needs for this run, from pyproject.toml; of llama-cpp-python only what that needs itself.
needed() {
    python3 - "$here/pyproject.toml" << 'PY'
import sys, tomllib
project = tomllib.load(open(sys.argv[1], "rb"))["project"]
tests = [name for name in project["optional-dependencies"]["test"] if name.startswith(("pytest", "numpy"))]
print(*(name for name in project["dependencies"] + tests if not name.startswith("llama-cpp-python")))
print("Cython>=3.1,<4", "setuptools>=65.5", "wheel", "typing-extensions", "diskcache")
PY
}

# --- The run -----------------------------------------------------------------------------------------------------

failed=0
declare -a took=()

# step NAME LIMIT_S command...: its output in a log of its own, its time in the report; a failure ends only this step.
step() {
    local name=$1 limit=$2 began=$SECONDS code=0
    shift 2
    say "$name ..."
    timeout --kill-after=10 "$limit" "$@" > "$out/$name.log" 2>&1 || code=$?
    took+=("$(printf '%-24s %5d s   %s' "$name" $((SECONDS - began)) "$([ "$code" = 0 ] && echo ok || echo "FAILED ($code)")")")
    say "${took[-1]}"
    if [ "$code" != 0 ]; then
        failed=1
        tail -5 "$out/$name.log" >&2
    fi
}

# The tree is copied, so that what is built for another Python or another llama.cpp does not touch it.
prepare() {
    tree="$out/tree"
    rm -rf "$tree" && mkdir -p "$tree"
    (cd "$here" && tar -cf - --exclude=__pycache__ --exclude='*.so' lqs tests bench setup.py pyproject.toml README.md) | tar -xf - -C "$tree"
    python3 -m venv "$out/venv"
    python="$out/venv/bin/python"
    "$python" -m pip -q install --no-index --find-links "$folder/wheels" "$folder"/wheels/*.whl
    export PYTHONPATH="$tree:$folder/site"
    export LD_LIBRARY_PATH="$folder/site/llama_cpp/lib:$(cuda_libraries)${LD_LIBRARY_PATH:-}"
    (cd "$tree" && "$python" -W ignore setup.py -q build_ext --inplace -j "$cores")
    "$python" -c 'import lqs.engine.library as library; library.start(verbose=False)'
}

# Where the CUDA runtime and cuBLAS are, if not where the loader looks anyway: in a toolkit, or in Python packages.
cuda_libraries() {
    local found
    for found in "${CUDA_HOME:-/usr/local/cuda}/lib64" $(python3 -c '
import importlib.util, pathlib
spec = importlib.util.find_spec("nvidia")
print(*(p for root in (spec.submodule_search_locations if spec else []) for p in pathlib.Path(root).glob("**/lib")))'); do
        printf '%s:' "$found"
    done
}

compile_there() {
    local work="$out/llama"
    mkdir -p "$work"
    tar -xf "$folder" -C "$work"
    compile_llama "$work/llama_cpp_python-$version/vendor/llama.cpp" "$work/out"
    lay_out "$work/llama_cpp_python-$version" "$work/out" "$out/made"
    cp -r "$(dirname "$folder")/wheels" "$out/made/"
}

synth() { # NAME SHAPE DTYPE
    step "synth-$1" 300 "$python" -m lqs models synth --force --shape "$2" --dtype "$3" "$out/$1.gguf"
}

# compare NAME THREADS: goals whose loads fit into minutes. On a GPU the CPU threads only feed it.
compare() {
    local goals=G1,G2,G3 quick=--quick limit=240
    if [ "$full" = 1 ]; then
        goals=G1,G2,G2c,G3,G4,G5 quick= limit=1800
    fi
    # shellcheck disable=SC2086
    step "compare-$1" "$limit" "$python" -m bench.compare --peer "llama-server=$peer" --model "$out/$1.gguf" \
        --threads "$2" --goals "$goals" $quick --json "$out/compare-$1.json"
}

report() {
    {
        echo "lqs on $1, $(date -u +%FT%TZ), llama-cpp-python $version, $cores cores"
        [ "$mode" = cpu ] || nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
        printf '%s\n' "${took[@]}"
        echo "in all ${SECONDS} s; the aim is 600 s on 16 cores"
        [ "$mode" != cpu ] || echo "NO GPU: run on the CPU with small shapes; it says that the script works, and nothing about a GPU"
        for name in "$out"/tests-gpu.log "$out"/compare-*.log; do
            [ ! -e "$name" ] || { echo; echo "== $(basename "$name" .log)"; tail -n 40 "$name"; }
        done
    } > "$out/report.txt"
    cat "$out/report.txt"
}

run_on_gpu() {
    command -v nvidia-smi > /dev/null && nvidia-smi -L | grep -q GPU || fail "no NVIDIA GPU here; --cpu tries the script without one"
    local began
    mkdir -p "$out"
    if [ "$mode" = source ]; then
        began=$SECONDS
        compile_there > "$out/compile.log" 2>&1 || { tail -20 "$out/compile.log" >&2; fail "llama.cpp does not compile here"; }
        took+=("$(printf '%-24s %5d s   ok' compile $((SECONDS - began)))")
        folder="$out/made"
    fi
    # No step of its own: it sets what the others use.
    began=$SECONDS
    prepare > "$out/prepare.log" 2>&1 || { tail -20 "$out/prepare.log" >&2; fail "the build does not fit this machine"; }
    took+=("$(printf '%-24s %5d s   ok' prepare $((SECONDS - began)))")
    peer=${peer:-$folder/bin/llama-server}
    cd "$tree"
    step tests-gpu 180 "$python" -m pytest -q -m gpu tests/gpu
    synth 1b 1b q8_0
    synth 8b layer=32,embd=4096,head=32,head_kv=8,ff=14336,ctx=8192,vocab=128256 q8_0
    compare 1b 4
    compare 8b 4
    report "$(nvidia-smi -L | head -1)"
}

run_on_cpu() {
    mkdir -p "$out"
    python="$here/.venv/bin/python"
    [ -x "$python" ] || python=$(command -v python3)
    peer=${peer:-$here/build/peer/out/bin/llama-server}
    [ -x "$peer" ] || fail "no llama-server at $peer: name one with --peer; bench/README.md says how to build it"
    cd "$here"
    step tests-gpu 180 "$python" -m pytest -q -m gpu tests/gpu
    synth small-a small q8_0
    synth small-b layer=6,embd=256,head=8,head_kv=4,ff=512,ctx=8192,vocab=4096 q8_0
    compare small-a 1
    compare small-b 1
    report "the CPU"
}

case "$mode" in
    make-build) make_build ;;
    cpu) run_on_cpu ;;
    *) run_on_gpu ;;
esac
exit "$failed"
