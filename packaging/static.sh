#!/bin/sh
# Builds a static binary with musl, which runs on any Linux of this architecture: packaging/static.sh [RUSTFLAG]...
#
# Where the toolchain has the target, or rustup can fetch it, that is all. Where neither is so, Debian's own compiler
# builds the standard library for musl first, from the sources that Debian packs with it.
set -eu
cd "$(dirname "$0")/.."

target=$(uname -m)-unknown-linux-musl
# In a folder of its own, since another compiler may build it.
export CARGO_TARGET_DIR=target/static
tests/prerequisites static
# For SQLite, which is C.
export "CC_$(echo "$target" | tr - _)=musl-gcc"

has_target() {
    ls "$(rustc --print target-libdir --target "$target")"/libstd-*.rlib >/dev/null 2>&1
}

if has_target || { timeout 60 rustup target add "$target" && has_target; } 2>/dev/null; then
    RUSTFLAGS="$*" cargo build --release --locked --target "$target"
else
    echo "rustup can't fetch $target: Debian's compiler builds the standard library for it"
    tests/prerequisites static-library
    # Alone in a folder: beside it there are libraries of glibc.
    libraries=$CARGO_TARGET_DIR/libraries
    mkdir -p "$libraries"
    cp "$(ls /usr/lib/llvm-*/lib/libunwind.a | head -n 1)" "$libraries"
    musl=/usr/lib/$(uname -m)-linux-musl
    flags="-C target-feature=+crt-static -C link-self-contained=no -L native=$PWD/$libraries"
    # musl-gcc does not know of static binaries that can be loaded anywhere, so it is told what they begin and end with.
    for first in -nostartfiles "$musl/rcrt1.o" "$musl/crti.o" "$(gcc -print-file-name=crtbeginS.o)"; do
        flags="$flags -Z pre-link-args=$first"
    done
    for last in "$(gcc -print-file-name=crtendS.o)" "$musl/crtn.o" -Wl,--no-dynamic-linker; do
        flags="$flags -C link-args=$last"
    done
    # Debian's unwinder says with this function of glibc's why it aborts; here it just does.
    flags="$flags -C link-args=-Wl,--defsym=__fprintf_chk=abort"
    # A stable compiler builds the standard library if it is told that this is meant.
    export "CARGO_TARGET_$(echo "$target" | tr 'a-z-' 'A-Z_')_LINKER=musl-gcc" RUSTC=/usr/bin/rustc RUSTC_BOOTSTRAP=1
    RUSTFLAGS="$* $flags" \
        /usr/bin/cargo build --release --locked --target "$target" -Z build-std=std,panic_unwind
fi
cp "$CARGO_TARGET_DIR/$target/release/adriaticum" target/adriaticum-static
if readelf --program-headers target/adriaticum-static | grep -q INTERP; then
    echo "target/adriaticum-static is not static" >&2
    exit 1
fi
target/adriaticum-static --version
echo "target/adriaticum-static runs on any Linux ($(uname -m))"
