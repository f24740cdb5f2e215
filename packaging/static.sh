#!/bin/sh
# Builds a static binary with musl, which runs on any Linux of this architecture: packaging/static.sh [RUSTFLAG]...
#
# If the toolchain does not have the target and rustup cannot download it, Debian's own compiler first builds the standard
# library for musl, from the sources in Debian's packages.
set -eu
cd "$(dirname "$0")/.."

target=$(uname -m)-unknown-linux-musl
# A separate folder, because another compiler may build it.
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
    echo "rustup cannot download $target: Debian's compiler builds the standard library for it"
    tests/prerequisites static-library
    # Copied to its own folder, because its original folder also has libraries of glibc.
    libraries=$CARGO_TARGET_DIR/libraries
    mkdir -p "$libraries"
    cp "$(ls /usr/lib/llvm-*/lib/libunwind.a | head -n 1)" "$libraries"
    musl=/usr/lib/$(uname -m)-linux-musl
    flags="-C target-feature=+crt-static -C link-self-contained=no -L native=$PWD/$libraries"
    # musl-gcc does not support static position-independent binaries, so name the objects at their start and end.
    for first in -nostartfiles "$musl/rcrt1.o" "$musl/crti.o" "$(gcc -print-file-name=crtbeginS.o)"; do
        flags="$flags -Z pre-link-args=$first"
    done
    for last in "$(gcc -print-file-name=crtendS.o)" "$musl/crtn.o" -Wl,--no-dynamic-linker; do
        flags="$flags -C link-args=$last"
    done
    # Debian's unwinder uses this glibc function to print why it aborts; here it aborts without a message.
    flags="$flags -C link-args=-Wl,--defsym=__fprintf_chk=abort"
    # RUSTC_BOOTSTRAP allows a stable compiler to build the standard library.
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
