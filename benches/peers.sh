#!/usr/bin/env bash
# Builds llama.cpp's llama-bench and llama-quantize, and makes the other formats of the demo model, for compare.py.
#
#   benches/peers.sh DIR [--no-amx | --amx] [--model MODEL.gguf]
#
# Opt-in: fetches the source package of llama-cpp-python from PyPI (80 MB), builds natively (some minutes), and writes
# DIR/bin/ and DIR/models/ (about 1 GB in all). What is there already is kept, so it can be run again after a failure.
# MODEL is the file to convert, by default the model of `neuropil demo` in the cache directory.
#
# Some virtual machines say that they have AMX and then stop its instructions: without --amx or --no-amx the program is
# tried, and built again without AMX where it dies of an illegal instruction.
# Needs pip, cmake and a C++ compiler.
set -euo pipefail

version=0.3.36
model=${XDG_CACHE_HOME:-$HOME/.cache}/neuropil/SmolLM2-135M-Instruct.Q4_1.gguf
dir=
amx=try
while [ $# -gt 0 ]; do
    case "$1" in
    --no-amx) amx=no ;;
    --amx) amx=yes ;;
    --model)
        model=${2:?--model takes a file}
        shift
        ;;
    -*)
        echo "$1 is no option; there are --no-amx, --amx and --model" >&2
        exit 2
        ;;
    *) dir=$1 ;;
    esac
    shift
done
[ -n "$dir" ] || {
    echo "usage: benches/peers.sh DIR [--no-amx | --amx] [--model MODEL.gguf]" >&2
    exit 2
}
[ -e "$model" ] || {
    echo "$model does not exist: run \`neuropil demo\` once, or give --model" >&2
    exit 1
}
mkdir -p "$dir/bin" "$dir/models"
dir=$(cd "$dir" && pwd)
say() { printf '\n== %s\n' "$*"; }

source=$dir/llama_cpp_python-$version
if [ ! -d "$source/vendor/llama.cpp" ]; then
    say "sources"
    if [ ! -e "$source.tar.gz" ]; then
        python3 -m pip download --quiet --no-deps --no-binary llama-cpp-python \
            --dest "$dir" "llama-cpp-python==$version"
    fi
    tar -xzf "$source.tar.gz" -C "$dir"
fi

# build FLAGS: builds both programs with these flags for the compilers.
build() {
    local generator=()
    if command -v ninja >/dev/null; then generator=(-G Ninja); fi
    rm -rf "$dir/build"
    cmake -S "$source/vendor/llama.cpp" -B "$dir/build" "${generator[@]}" -DCMAKE_BUILD_TYPE=Release \
        -DBUILD_SHARED_LIBS=OFF -DGGML_NATIVE=ON -DLLAMA_CURL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
        -DLLAMA_BUILD_SERVER=OFF -DCMAKE_C_FLAGS="$1" -DCMAKE_CXX_FLAGS="$1" >"$dir/build.log"
    cmake --build "$dir/build" --target llama-bench llama-quantize --parallel "$(nproc)" >>"$dir/build.log"
    cp "$dir/build/bin/llama-bench" "$dir/build/bin/llama-quantize" "$dir/bin/"
}

without_amx="-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
runs() { "$dir/bin/llama-bench" -m "$model" -p 16 -n 1 -r 1 >/dev/null 2>&1; }
if [ ! -x "$dir/bin/llama-bench" ] || [ ! -x "$dir/bin/llama-quantize" ]; then
    say "build; the log is $dir/build.log"
    if [ "$amx" = no ]; then build "$without_amx"; else build ""; fi
fi
if runs; then
    :
elif [ $? -eq 132 ] && [ "$amx" = try ]; then
    say "build again without AMX, whose instructions are stopped here"
    build "$without_amx"
    runs
else
    echo "$dir/bin/llama-bench does not run on $model" >&2
    exit 1
fi

name=$(basename "$model" .gguf)
name=${name%.*}
for format in Q4_0 Q8_0 Q4_K_M F16 BF16; do
    out=$dir/models/$name.$format.gguf
    if [ ! -e "$out" ]; then
        say "$name as $format"
        "$dir/bin/llama-quantize" --allow-requantize "$model" "$out.part" "$format" >"$dir/quantize.log" 2>&1
        mv "$out.part" "$out"
    fi
done

say "done"
echo "benches/compare.py --llama-bench $dir/bin/llama-bench $model $dir/models/*.gguf"
