#!/bin/sh
# Builds a static binary with musl, which runs on any Linux of this architecture: packaging/static.sh [RUSTFLAG]...
#
# Where the toolchain has the target, or rustup can fetch it, that is all. Where neither is so, Debian's own compiler
# builds the standard library for musl first, from the sources that Debian packs with it.
set -eu
cd "$(dirname "$0")/.."

target=$(uname -m)-unknown-linux-musl
variable=$(echo "$target" | tr 'a-z-' 'A-Z_')
tests/outside/need 'command -v musl-gcc' musl-tools
# For SQLite, which is C.
export "CC_$(echo "$target" | tr - _)=musl-gcc" "CARGO_TARGET_${variable}_LINKER=musl-gcc"

has_target() {
    ls "$(rustc --print target-libdir --target "$target")"/libstd-*.rlib >/dev/null 2>&1
}

if has_target || { timeout 60 rustup target add "$target" && has_target; } 2>/dev/null; then
    RUSTFLAGS="$*" cargo build --release --locked --target "$target"
else
    echo "rustup can't fetch the target $target: Debian's compiler builds the standard library for it"
    tests/outside/need '/usr/bin/rustc --version && /usr/bin/cargo --version' cargo-web
    tests/outside/need 'test -e /usr/lib/rustlib/src/rust/library/std' rust-web-src
    # The standard library asks for LLVM's unwinder; GCC's does the same.
    unwinder=target/$target/unwinder
    mkdir -p "$unwinder"
    ln -sf "$(gcc -print-file-name=libgcc_eh.a)" "$unwinder/libunwind.a"
    # The standard library can be built with a stable compiler, if it is told that this is meant.
    RUSTC_BOOTSTRAP=1 RUSTC=/usr/bin/rustc \
        RUSTFLAGS="$* -C target-feature=+crt-static -C link-self-contained=no -L native=$PWD/$unwinder" \
        /usr/bin/cargo build --release --locked --target "$target" -Z build-std=std,panic_unwind
fi
cp "target/$target/release/adriaticum" target/adriaticum-static
file_type=$(LC_ALL=C ldd target/adriaticum-static 2>&1 || true)
case $file_type in
*'not a dynamic executable'* | *'statically linked'*) echo "target/adriaticum-static: static" ;;
*) echo "target/adriaticum-static is not static: $file_type" >&2 && exit 1 ;;
esac
