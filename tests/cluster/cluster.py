"""A PostgreSQL cluster on loopback from Debian's packages: three etcd members and three Patroni nodes, with synchronous
replication. Needs root.

Each server is the first process of a PID namespace, and runs as an unprivileged user. Killing it ends all its processes at
the same moment, as a power cut would, and nothing is left running when this program ends, whatever ends it.
"""

import contextlib
import json
import os
import pathlib
import pwd
import re
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "outside"))
from service import ensure, free_port, until  # noqa: E402

# psql finds the primary among the hosts of a URI, as a gateway does.
TO_PRIMARY = {**os.environ, "PGTARGETSESSIONATTRS": "read-write"}

NODES = ("n1", "n2", "n3")
PROGRAMS = "/usr/lib/postgresql/15/bin"
START_SECONDS = 180
# For any change, such as a node that has to copy the whole database.
CHANGE_SECONDS = 180
REST_SECONDS = 5


class Server:
    """A program in a PID namespace of its own."""

    def __init__(self, user, folder, *command):
        self.user, self.folder, self.command = pwd.getpwnam(user), folder, command
        folder.mkdir(mode=0o700)
        os.chown(folder, self.user.pw_uid, self.user.pw_gid)
        self.process = None

    def start(self):
        # When this program ends, unshare is killed, and with it the namespace. (A change of the user resets --kill-child.)
        command = ["setpriv", "--pdeathsig=KILL", "unshare", "--pid", "--fork", "--mount-proc", "setpriv",
                   f"--reuid={self.user.pw_uid}", f"--regid={self.user.pw_gid}", "--clear-groups", "--pdeathsig=KILL",
                   *map(str, self.command)]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                command, cwd=self.folder, env=os.environ | {"HOME": str(self.folder)}, stdin=subprocess.DEVNULL, stdout=log,
                stderr=log, start_new_session=True)

    def kill(self):
        if self.process and self.process.poll() is None:
            # The end of the first process ends all, and unshare then.
            for pid in self.processes()[:1] or [self.process.pid]:
                os.kill(pid, signal.SIGKILL)
            self.process.wait()

    def processes(self):
        """The ids of the processes in its namespace, the first one first."""
        with contextlib.suppress(OSError):
            namespace = os.readlink(f"/proc/{self.process.pid}/ns/pid_for_children")
            if namespace != os.readlink("/proc/self/ns/pid"):
                found = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if namespace_of(pid) == namespace]
                return sorted(found, key=number_inside)
        return []

    def pause(self, program=""):
        """Stops the processes whose command line contains a word, by default all."""
        # A process may start another one before it is stopped.
        for _ in range(3):
            self.signal(signal.SIGSTOP, program)

    def resume(self):
        self.signal(signal.SIGCONT)

    def signal(self, number, program=""):
        for pid in self.processes():
            with contextlib.suppress(OSError):
                if program in pathlib.Path(f"/proc/{pid}/cmdline").read_text():
                    os.kill(pid, number)

    def last_logged(self):
        return "\n".join((self.folder / "log").read_text(errors="replace").splitlines()[-15:])


def namespace_of(pid):
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/pid")


def number_inside(pid):
    """The id that a process has in its own namespace."""
    with contextlib.suppress(OSError):
        status = pathlib.Path(f"/proc/{pid}/status").read_text()
        return int(re.search(r"NSpid:.*\s(\d+)\n", status)[1])
    return sys.maxsize


class Cluster:
    """Starts when it is entered, and is stopped and removed at the end. It is in a folder below `parent`, by default in /tmp."""

    def __init__(self, parent=None):
        self.parent = parent

    def __enter__(self):
        self.temporary = tempfile.TemporaryDirectory(
            prefix="adriaticum-cluster-", dir=self.parent, ignore_cleanup_errors=True)
        self.folder = pathlib.Path(self.temporary.name)
        self.folder.chmod(0o755)
        kinds = [(kind, node) for kind in ("client", "peer", "rest", "sql") for node in NODES]
        ports = set()
        while len(ports) < len(kinds):
            ports.add(free_port())
        self.ports = dict(zip(kinds, ports))
        self.members = [Server("etcd", self.folder / f"etcd-{node}", *self.etcd_command(node)) for node in NODES]
        self.nodes = {node: Server("postgres", self.folder / node, "patroni", self.folder / f"{node}.yml") for node in NODES}
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for server in (*self.nodes.values(), *self.members):
            server.kill()
        self.temporary.cleanup()

    def start(self):
        for member in self.members:
            member.start()
        for name, node in self.nodes.items():
            # JSON is YAML too.
            (self.folder / f"{name}.yml").write_text(json.dumps(self.configuration(name), indent=1))
            node.start()
        self.wait_until_whole(START_SECONDS)
        self.superuser = self.uri("postgres:super", "postgres")
        psql(self.superuser, "CREATE ROLE adriaticum LOGIN PASSWORD 'secret'")

    def new_database(self, name):
        psql(self.superuser, f"CREATE DATABASE {name} OWNER adriaticum")
        # psql gives up at the first host that does not have it yet.
        replayed = "SELECT count(*) = 2 FROM pg_stat_replication WHERE replay_lsn >= pg_current_wal_lsn()"
        until(lambda: psql(self.superuser, replayed).strip() == "t")
        return self.uri("adriaticum:secret", name)

    def uri(self, user, database):
        hosts = ",".join(f"127.0.0.1:{self.ports['sql', node]}" for node in NODES)
        return f"postgresql://{user}@{hosts}/{database}"

    def etcd_command(self, node):
        def url(kind, name):
            return f"http://127.0.0.1:{self.ports[kind, name]}"

        members = ",".join(f"{name}={url('peer', name)}" for name in NODES)
        # Without --pre-vote a member that comes back forces an election, during which Patroni demotes a healthy primary.
        return ("etcd", "--name", node, "--data-dir", self.folder / f"etcd-{node}" / "data", "--log-level", "warn",
                "--logger", "zap", "--listen-client-urls", url("client", node), "--advertise-client-urls", url("client", node),
                "--listen-peer-urls", url("peer", node), "--initial-advertise-peer-urls", url("peer", node),
                "--initial-cluster", members, "--initial-cluster-state", "new", "--enable-v2=true", "--pre-vote",
                # A loaded machine must not cost it its leader.
                "--heartbeat-interval", "300", "--election-timeout", "3000")

    def configuration(self, node):
        def address(kind):
            return f"127.0.0.1:{self.ports[kind, node]}"

        folder = self.folder / node
        return {
            "scope": "gateways", "name": node,
            "restapi": {"listen": address("rest"), "connect_address": address("rest")},
            # Not etcd3: Debian 12's Patroni 3.0.2 loses acknowledged commits with it when a stopped primary is resumed.
            "etcd": {"hosts": [f"127.0.0.1:{self.ports['client', name]}" for name in NODES]},
            "bootstrap": {
                "dcs": {
                    "ttl": 20, "loop_wait": 5, "retry_timeout": 5, "synchronous_mode": True, "synchronous_mode_strict": True,
                    "failsafe_mode": True,
                    "postgresql": {"use_pg_rewind": True, "use_slots": True, "parameters": {
                        "max_connections": 200, "shared_buffers": "64MB", "wal_log_hints": "on",
                        "wal_sender_timeout": "5s", "wal_receiver_timeout": "5s", "client_connection_check_interval": "2s",
                        "tcp_keepalives_idle": 5, "tcp_keepalives_interval": 2, "tcp_keepalives_count": 3,
                        "tcp_user_timeout": "10s"}},
                },
                "initdb": [{"encoding": "UTF8"}, {"locale": "C.UTF-8"}, "data-checksums"],
                "pg_hba": ["local all all trust", "host replication replicator 127.0.0.1/32 scram-sha-256",
                           "host all all 127.0.0.1/32 scram-sha-256"],
            },
            "postgresql": {
                "listen": address("sql"), "connect_address": address("sql"), "use_unix_socket": True,
                "data_dir": str(folder / "data"), "bin_dir": PROGRAMS, "pgpass": str(folder / "pgpass"),
                "authentication": {"superuser": {"username": "postgres", "password": "super"},
                                   "replication": {"username": "replicator", "password": "replica"},
                                   "rewind": {"username": "rewinder", "password": "rewind"}},
                "parameters": {"unix_socket_directories": str(folder)},
            },
            "watchdog": {"mode": "off"},
        }

    def roles(self):
        """The role of each running member as the cluster sees it: leader, sync_standby or replica."""
        for node in NODES:
            with contextlib.suppress(OSError, ValueError):
                members = json.loads(self.ask(node, "/cluster"))["members"]
                return {member["name"]: member["role"] for member in members if member["state"] in ("running", "streaming")}
        return {}

    def ask(self, node, path, body=None):
        data = body and json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.ports['rest', node]}{path}", data)
        with urllib.request.urlopen(request, timeout=CHANGE_SECONDS if body else REST_SECONDS) as response:
            return response.read()

    def is_whole(self):
        return sorted(self.roles().values()) == ["leader", "replica", "sync_standby"]

    def wait_until_whole(self, seconds=CHANGE_SECONDS):
        """Waits for a primary, a synchronous standby and another standby."""
        if not until(self.is_whole, seconds):
            logs = "\n".join(f"{server.folder.name}:\n{server.last_logged()}" for server in (*self.members, *self.nodes.values()))
            ensure(False, f"the cluster is not whole after {seconds} s: {self.roles()}\n{logs}")

    def processes(self):
        return [pid for server in (*self.members, *self.nodes.values()) for pid in server.processes()]

    def name_of(self, role):
        """The member that has a role, as soon as one has it: a standby may be joining again."""
        found = []
        ensure(until(lambda: found.extend(name for name, its in self.roles().items() if its == role) or found, CHANGE_SECONDS),
               f"no node became {role}: {self.roles()}")
        return found[0]

    def with_role(self, role):
        return self.nodes[self.name_of(role)]

    def switch_over(self):
        """Makes the synchronous standby the primary; returns when Patroni says that it is done."""
        leader = self.name_of("leader")
        return self.ask(leader, "/switchover", {"leader": leader, "candidate": self.name_of("sync_standby")}).decode()


@contextlib.contextmanager
def locked(uri, table):
    """Keeps writers off a table, as CREATE INDEX does. Reads go on."""
    is_locked = (f"SELECT 1 FROM pg_locks WHERE relation = '{table}'::regclass AND mode = 'ShareLock' AND granted "
                 "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())")
    # It ends with its input, and the lock with it.
    command = ["psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", uri]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=TO_PRIMARY) as session:
        session.stdin.write(f"SET lock_timeout = '30s';\nBEGIN;\nLOCK TABLE {table} IN SHARE MODE;\n")
        session.stdin.flush()
        ensure(until(lambda: psql(uri, is_locked)), f"the table {table} can't be locked")
        yield


def psql(uri, sql, *options, timeout=None):
    """Runs SQL with psql and returns what it prints, without alignment."""
    command = ["psql", "-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", *options, "-c", sql, uri]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=TO_PRIMARY)
    ensure(done.returncode == 0, f"psql: {done.stderr}")
    return done.stdout
