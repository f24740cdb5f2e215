#!/bin/sh
# Runs cargo for an architecture and a C library: packaging/cross.sh amd64|arm64 gnu|musl CARGO-ARGUMENT...
#
# Results are in target/cross. With musl the binary is static. If rustup cannot download the target, Debian's own compiler
# builds it.
set -eu
cd "$(dirname "$0")/.."
arch=$1 libc=$2
shift 2
case $arch in
amd64) machine=x86_64 ;;
arm64) machine=aarch64 ;;
*) echo "ARCH=$arch: expected amd64 or arm64." >&2 && exit 2 ;;
esac
target=$machine-unknown-linux-$libc
tests/prerequisites "cross-$libc-$arch"

# Other flags in the same folder would make the next `make build` compile everything again.
export CARGO_TARGET_DIR=target/cross

# Debian's compiler for the architecture links, and compiles the C code of SQLite and ring.
gcc=$machine-linux-gnu-gcc
test "$libc" = gnu && cc=$gcc || cc="$gcc -specs=/usr/lib/$machine-linux-musl/musl-gcc.specs"
name=$(echo "$target" | tr - _)
linker=CARGO_TARGET_$(echo "$name" | tr a-z A-Z)_LINKER
export "CC_$name=$cc" "AR_$name=$machine-linux-gnu-ar" "$linker=$gcc"

has_target() {
    ls "$(rustc --print target-libdir --target "$target")"/libstd-*.rlib >/dev/null 2>&1
}
if has_target || { timeout 60 rustup target add "$target" && has_target; } 2>/dev/null; then
    exec cargo "$@" --target "$target"
fi

echo "rustup cannot download $target: Debian's compiler is used"
tests/prerequisites "debian-$libc-$arch"
export RUSTC=/usr/bin/rustc
test "$libc" = musl || exec /usr/bin/cargo "$@" --target "$target"

# Debian has no standard library for musl, so it is built here; RUSTC_BOOTSTRAP allows a stable compiler to do that. Its
# unwinder is LLVM's, which calls a function of glibc to print why it aborts; here it aborts without a message.
unwinder=$PWD/$CARGO_TARGET_DIR/unwinder-$arch
mkdir -p "$unwinder"
(cd "$unwinder" && { test -d usr || { apt-get download "libunwind-14-dev:$arch" && dpkg -x libunwind-14-dev_*.deb .; }; })
# A wrapper, because a linker has no arguments. It links no static position-independent binaries.
printf '#!/bin/sh\nexec %s "$@"\n' "$cc" > "$unwinder/musl-gcc"
chmod +x "$unwinder/musl-gcc"
export "$linker=$unwinder/musl-gcc" RUSTC_BOOTSTRAP=1
flags="-C target-feature=+crt-static -C relocation-model=static -C link-self-contained=no"
flags="$flags -L native=$unwinder/usr/lib/llvm-14/lib -C link-args=-Wl,--defsym=__fprintf_chk=abort"
RUSTFLAGS="${RUSTFLAGS:-} $flags" exec /usr/bin/cargo "$@" --target "$target" -Z build-std=std,panic_unwind
