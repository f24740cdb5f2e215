#!/bin/sh
# Starts PostgreSQL with a folder and a port of its own, prints its URI and the folder, and removes everything when
# standard input ends, which it does when the test ends in any way: postgres.sh [FOLDER OF server.crt AND server.key]
#
# As root it runs as the user postgres. The role adriaticum may create databases; through the Unix socket in the folder
# the role postgres may do anything.
set -eu
if [ "$(id -u)" = 0 ]; then
    # That user may have no access to the folder of this script.
    exec setpriv --reuid=postgres --regid=postgres --clear-groups sh -c "$(cat "$0")" sh "$@"
fi
cd /
bin=/usr/lib/postgresql/15/bin
test -x $bin/postgres || { echo "PostgreSQL 15 is missing: apt-get install postgresql-15" >&2; exit 1; }
folder=$(mktemp -d "${TMPDIR:-/tmp}/adriaticum-postgres-XXXXXX")
chmod 755 "$folder"
server=
end() {
    test -z "$server" || { kill -INT "$server" 2>/dev/null && wait "$server" || true; }
    rm -rf "$folder"
}
trap end EXIT
trap 'exit 1' INT TERM

$bin/initdb --pgdata="$folder/data" --username=postgres --encoding=UTF8 --locale=C.UTF-8 --no-sync --auth=trust \
    > "$folder/log" 2>&1 || { cat "$folder/log" >&2; exit 1; }
cat > "$folder/data/pg_hba.conf" <<END
local all all trust
host all all 127.0.0.1/32 scram-sha-256
END
cat >> "$folder/data/postgresql.conf" <<END
listen_addresses = '127.0.0.1'
unix_socket_directories = '$folder'
max_connections = 300
shared_buffers = 32MB
# The tests end before anything could be lost.
fsync = off
END
if [ -n "${1:-}" ]; then
    cp "$1/server.crt" "$1/server.key" "$folder/data/"
    chmod 600 "$folder/data/server.key"
    echo "ssl = on" >> "$folder/data/postgresql.conf"
fi

# "secret", hashed once and not 4,096 times: that takes a second in a test under QEMU, and connections have 2 s.
password='SCRAM-SHA-256$1:YWRyaWF0aWN1bSB0ZXN0cw==$ks6HiIJgnpIyAYMWxc1kKG+/JTvX5VGghBon7XiEAco=:uNSFJem1EvnjUt4XwMdaKX9D8Ju22ag3wfGPugwj5fw='
# Below the range of outgoing connections. Another program may have the port, or take it before the server does.
for port in $(shuf -n 20 -i 20000-32000); do
    $bin/postgres -D "$folder/data" -p "$port" >> "$folder/log" 2>&1 < /dev/null &
    server=$!
    while kill -0 $server 2>/dev/null && ! $bin/pg_isready -q -h "$folder" -p "$port"; do sleep 0.05; done
    if kill -0 $server 2>/dev/null; then
        $bin/psql -q -h "$folder" -p "$port" -U postgres \
            -c "CREATE ROLE adriaticum LOGIN CREATEDB PASSWORD '$password'" >> "$folder/log" 2>&1
        printf '%s\n' "postgresql://adriaticum:secret@127.0.0.1:$port/postgres?sslmode=disable" "$folder"
        cat > /dev/null
        exit 0
    fi
done
cat "$folder/log" >&2
exit 1
