#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Gets the peers that benchmarks/peers.py measures: bash benchmarks/peers.sh [NAME...]
#
# NAME: llama.cpp, ik_llama.cpp, onnxruntime, openvino, onednn; all but onednn where none is given. The first two are
# built from the sources in the sdists of llama-cpp-python and ik-llama-cpp-python, their ggml library alone, for this
# CPU, into $PEERS (default .peers in the checkout): a few and some fifteen minutes of one core. The others are wheels,
# installed beside tunekit by $PYTHON. Set JOBS to compile that many files at once, TARGETS=llama for the whole libllama,
# which python -m q8llama.peers measures, and MARCH=znver3, say, for another CPU's instructions than this one's.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
peers=$(mkdir -p "${PEERS:-.peers}" && cd "${PEERS:-.peers}" && pwd)
jobs=${JOBS:-$(nproc)}
instructions=(-DGGML_NATIVE=ON)
[ -z "${MARCH:-}" ] || instructions=(-DGGML_NATIVE=OFF "-DCMAKE_C_FLAGS=-march=$MARCH" "-DCMAKE_CXX_FLAGS=-march=$MARCH")

# A project: its name, its distribution and version, the folder of its sources in the sdist, CMake's options.
build() {
    local name=$1 distribution=$2 version=$3 sources=$4
    shift 4
    local folder=$peers/$name
    mkdir -p "$folder"
    if [ ! -d "$peers/tools" ]; then
        "$python" -m venv "$peers/tools"
        "$peers/tools/bin/pip" install -q cmake ninja scikit-build-core
    fi
    local sdist
    sdist=$(echo "$folder/${distribution//-/_}-$version".tar.gz)
    if [ ! -f "$sdist" ]; then
        PATH=$peers/tools/bin:$PATH "$peers/tools/bin/pip" download -q --no-deps --no-build-isolation --no-binary :all: \
            -d "$folder" "$distribution==$version"
    fi
    tar -xzf "$sdist" -C "$folder"
    echo "$version" > "$folder/VERSION"
    PATH=$peers/tools/bin:$PATH cmake -G Ninja -S "$folder/${distribution//-/_}-$version/$sources" -B "$folder/build" \
        "${instructions[@]}" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON -DGGML_CCACHE=OFF \
        -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF "$@" > "$folder/configure.log"
    PATH=$peers/tools/bin:$PATH cmake --build "$folder/build" --target "${TARGETS:-ggml}" -j "$jobs" > "$folder/build.log"
    echo "$name $version: $(find "$folder/build" -name libggml.so | head -1)"
}

[ $# -gt 0 ] || set -- llama.cpp ik_llama.cpp onnxruntime openvino
for name in "$@"; do
    case $name in
        llama.cpp) build llama.cpp llama-cpp-python 0.3.36 vendor/llama.cpp ;;
        # gcc 12 does not compile its flash attention, which no matrix product needs; switched off, it leaves two names
        # undefined, which never get called.
        ik_llama.cpp)
            mkdir -p "$peers/ik_llama.cpp"
            echo 'long iqk_fa_work_buffer_size(void) { return 0; } int iqk_flash_attn_noalibi(void) { return 0; }' |
                cc -x c -O2 -fPIC -c -o "$peers/ik_llama.cpp/none.o" -
            build ik_llama.cpp ik-llama-cpp-python 0.1.5 vendor/ik_llama.cpp -DGGML_IQK_FLASH_ATTENTION=OFF \
                -DGGML_IQK_FA_ALL_QUANTS=OFF "-DCMAKE_SHARED_LINKER_FLAGS=$peers/ik_llama.cpp/none.o" ;;
        onnxruntime) "$python" -m pip install -q onnxruntime onnx ;;
        openvino) "$python" -m pip install -q openvino ;;
        # Its wheel is built on SYCL: two more gigabytes.
        onednn) "$python" -m pip install -q onednn intel-sycl-rt intel-opencl-rt ;;
        *) echo "peers.sh: unknown peer $name (llama.cpp, ik_llama.cpp, onnxruntime, openvino, onednn)" >&2; exit 2 ;;
    esac
done
