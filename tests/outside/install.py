"""Boots a Debian with systemd, and installs, uses, breaks, restarts, upgrades, removes and purges the package there, as an
operator would. Then boots a new one, and installs the static binary with the commands of docs/deploy.md.

    python3 tests/outside/install.py

debootstrap makes the tree once, from the first of this machine's apt sources, in target/machine. The tree runs in
systemd-nspawn on this host's network, with free ports. It needs root.
"""

import contextlib
import http.client
import itertools
import json
import os
import pathlib
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

from service import ROOT, Runtime, ask, conversation, ensure, free_port, until

MACHINE = ROOT / "target" / "machine"
PACKAGES = ROOT / "target" / "debian"
STATIC = ROOT / "target" / "static" / ("arm64" if platform.machine() == "aarch64" else "amd64") / "adriaticum"
RELEASE = "bookworm"

BOOT_SECONDS = 60
PATIENCE = 30

# Clients that send requests while the service is restarted, half of them on a new connection for every request.
CLIENTS = 8

RESTARTS = 5
QUESTION = conversation("Still there?")


def main():
    ensure(os.geteuid() == 0, "install.py boots a container, which needs root: sudo make test-install")
    package = newest(PACKAGES.glob("adriaticum_*.deb"))
    began = time.monotonic()
    lint(package)
    same_files(package)
    completions()
    base = tree()
    later = repacked(package, "99.0.0")
    with SlowRuntime() as runtime:
        for steps in (STEPS, [static_binary]):
            with Machine(base) as machine:
                for step in steps:
                    began_step = time.monotonic()
                    result = step(machine, runtime, package, later)
                    seconds = time.monotonic() - began_step
                    print(f"install: {step.__name__.replace('_', ' ')}: {result} ({seconds:.1f} s)", flush=True)
    print(f"install: all steps in {time.monotonic() - began:.0f} s")


# The steps.


def install(machine, runtime, package, later):
    machine.choose_port()
    # The default of half a minute would be long for a test.
    machine.write("/etc/systemd/system/adriaticum.service.d/watchdog.conf", "[Service]\nWatchdogSec=2s\n")
    machine.install(package)
    for unit in ("adriaticum.socket", "adriaticum.service"):
        ensure(machine.show(unit, "ActiveState") == "active", f"{unit} is not active:\n{machine.status()}")
        ensure(machine.run("systemctl", "is-enabled", unit).strip() == "enabled", f"{unit} is not enabled")
    ensure(machine.show("adriaticum.service", "User") == "adriaticum", "it does not run as its own user")
    state = machine.run("stat", "-c", "%U:%G %a", "/var/lib/adriaticum", "/etc/adriaticum/adriaticum.toml").split("\n")
    ensure(state[:2] == ["adriaticum:adriaticum 750", "root:adriaticum 640"], f"owners and modes are {state}")

    # A runtime, and a key for it that only root can read.
    settings = machine.read("/etc/adriaticum/adriaticum.toml").replace("#url = []", f'url = "{runtime.url}"')
    machine.write("/etc/adriaticum/adriaticum.toml", settings)
    machine.write("/etc/adriaticum/runtime-key", "sesame\n")
    machine.run("chmod", "600", "/etc/adriaticum/runtime-key")
    machine.run("systemctl", "restart", "adriaticum")

    # The sandbox lets the console's threads give way to the workers.
    process = machine.outside(machine.pid())
    threads = [path.read_text() for path in pathlib.Path(f"/proc/{process}/task").glob("*/stat")]
    nice = [thread.split()[18] for thread in threads if "(console)" in thread]
    # The machine has the nice value of this program.
    ensure(nice == [str(os.nice(0) + 10)] * 2, f"the nice values of the console's threads are {nice}")

    # Root and the service's user can run commands, and the database stays the property of the service's user.
    machine.key = machine.run("adriaticum", "keys", "create", "load").strip()
    machine.run("setpriv", "--reuid=adriaticum", "--regid=adriaticum", "--clear-groups", "adriaticum", "keys", "list")
    for host in ("127.0.0.1", "::1"):
        ensure(machine.complete(host=host) == 200, f"no completion at {host}:\n{machine.journal()}")
    ensure(runtime.calls[-1].headers.get("authorization") == "Bearer sesame", "the runtime did not get its key")
    owners = set(machine.run("stat", "-c", "%U", *machine.databases()).split())
    ensure(owners == {"adriaticum"}, f"the database belongs to {owners}")
    machine.run("adriaticum", "check")
    ensure(runtime.calls[-1].headers.get("authorization") == "Bearer sesame", "the check did not find the runtime's key")

    # The same if a command of root creates the database before the first start.
    machine.run("systemctl", "stop", "adriaticum.socket", "adriaticum.service")
    machine.run("rm", *machine.databases())
    machine.answered = 0
    machine.key = machine.run("adriaticum", "keys", "create", "load").strip()
    machine.run("systemctl", "start", "adriaticum.socket")
    ensure(machine.complete() == 200, f"the socket did not start the service:\n{machine.journal()}")
    sandbox = machine.run("systemd-analyze", "security", "adriaticum.service").strip().splitlines()[-1]
    return f"active, completions served, {re.search(r'[0-9.]+ [A-Z]+', sandbox)[0]} by systemd-analyze security"


def broken_setting(machine, *_):
    good = machine.read("/etc/adriaticum/adriaticum.toml")
    machine.write("/etc/adriaticum/adriaticum.toml", "workers = 0\n" + good)
    ensure(machine.try_run("systemctl", "restart", "adriaticum").returncode != 0, "it starts with a broken setting")
    status = machine.status()
    ensure("/etc/adriaticum/adriaticum.toml:1: workers = 0" in status, f"systemctl status does not say why:\n{status}")
    starts = machine.starts()
    # A client that connects is not refused, and does not make the service restart forever.
    with contextlib.suppress(OSError, http.client.HTTPException):
        machine.complete(timeout=3)
    tried = machine.starts() - starts
    ensure(tried <= 8, f"it was started {tried} times")
    machine.write("/etc/adriaticum/adriaticum.toml", good)
    machine.run("systemctl", "reset-failed", "adriaticum.service", "adriaticum.socket")
    machine.run("systemctl", "restart", "adriaticum")
    ensure(machine.complete() == 200, f"no completion after the setting was corrected:\n{machine.journal()}")
    return f"shown by systemctl status, {tried} starts by a waiting client, works again after a restart"


def reload(machine, *_):
    pid = machine.pid()
    good = machine.read("/etc/adriaticum/adriaticum.toml")
    machine.write("/etc/adriaticum/adriaticum.toml", 'log_level = "debug"\nqueue = 7\n' + good)
    machine.run("systemctl", "reload", "adriaticum")
    machine.wait_for(lambda: "queue" in machine.journal() and "restart" in machine.journal(), "the log says that a restart is needed")
    machine.write("/etc/adriaticum/adriaticum.toml", good)
    machine.run("systemctl", "reload", "adriaticum")
    ensure(machine.complete() == 200 and machine.pid() == pid, "the reload restarted the service")
    return "the settings that apply at once and those that wait for a restart are logged, the process stays"


def optional_runtime(machine, *_):
    """Tests the unit of the runtime with a llama-server that only reads its model."""
    refused = machine.try_run("systemctl", "start", "adriaticum-runtime")
    ensure(refused.returncode != 0, "it was started without a model")
    machine.write("/var/lib/adriaticum-runtime/model.gguf", "a model\n")
    machine.write("/usr/local/bin/llama-server", '#!/bin/sh\ntest "$1" = --model && cat "$2" && exec sleep infinity\n')
    machine.run("chmod", "755", "/usr/local/bin/llama-server")
    machine.run("systemctl", "start", "adriaticum-runtime")
    journal = ("journalctl", "--no-pager", "-u", "adriaticum-runtime")
    machine.wait_for(lambda: "a model" in machine.run(*journal), "the runtime reads its model")
    ensure(machine.show("adriaticum-runtime", "ActiveState") == "active", machine.run(*journal))
    return "active"


def kill(machine, *_):
    pid = machine.pid()
    os.kill(machine.outside(pid), signal.SIGKILL)
    # The request waits in the socket until the service is back.
    ensure(machine.complete() == 200, f"it did not come back:\n{machine.journal()}")
    ensure(machine.pid() != pid, "it was not killed")
    return "restarted, and the waiting request was answered"


def watchdog(machine, *_):
    pid = machine.pid()
    os.kill(machine.outside(pid), signal.SIGSTOP)
    machine.wait_for(lambda: machine.pid() not in (0, pid), "the watchdog restarts a stopped service")
    ensure("watchdog" in machine.run("journalctl", "-u", "adriaticum", "--no-pager").lower(), "it was not the watchdog")
    ensure(machine.complete() == 200, f"no completion:\n{machine.journal()}")
    return "restarted"


def restart_under_load(machine, *_):
    with Load(machine) as load:
        pids = {machine.pid()}
        for _ in range(RESTARTS):
            load.wait_for_more(100)
            machine.run("systemctl", "restart", "adriaticum")
            pids.add(machine.pid())
        load.wait_for_more(100)
    ensure(len(pids) == RESTARTS + 1, "it was not restarted each time")
    return f"{RESTARTS} restarts, {load}"


def upgrade_under_load(machine, runtime, package, later):
    with Load(machine) as load:
        pid, socket_since = machine.pid(), machine.show("adriaticum.socket", "ActiveEnterTimestampMonotonic")
        load.wait_for_more(100)
        machine.install(later)
        load.wait_for_more(100)
    version = machine.run("dpkg-query", "-W", "-f", "${Version}", "adriaticum")
    ensure(version == "99.0.0" and machine.pid() != pid, f"version {version} is installed, or the service was not restarted")
    ensure(
        machine.show("adriaticum.socket", "ActiveEnterTimestampMonotonic") == socket_since, "the socket was restarted"
    )
    ensure(runtime.url in machine.read("/etc/adriaticum/adriaticum.toml"), "the configuration was overwritten")
    rows = json.loads(machine.run("adriaticum", "usage", "--json"))
    machine.run("adriaticum", "usage", "verify")
    # The ledger has every answer that a client has read.
    ensure(rows["requests"] - rows["errors"] >= machine.answered, f"{machine.answered} answers, but {rows}")
    return f"{load}; {rows['requests']} rows, {rows['errors']} of them errors"


def remove(machine, *_):
    machine.run("apt-get", "-y", "-qq", "remove", "adriaticum")
    ensure(not machine.exists("/usr/bin/adriaticum"), "the program is still there")
    ensure(machine.exists("/var/lib/adriaticum/adriaticum.db"), "the data is gone")
    ensure(machine.exists("/etc/adriaticum/adriaticum.toml"), "the configuration is gone")
    ensure(machine.pid() == 0, "the service still runs")
    with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", machine.port)):
        raise SystemExit("the socket still listens")
    return "the data and the configuration stay"


def purge(machine, *_):
    machine.run("apt-get", "-y", "-qq", "purge", "adriaticum")
    paths = ("/var/lib/adriaticum", "/var/lib/adriaticum-runtime", "/etc/adriaticum")
    left = [path for path in paths if machine.exists(path)]
    ensure(not left, f"there is still {left}")
    links = machine.run("find", "/etc/systemd/system", "-name", "adriaticum*", "-type", "l").strip()
    ensure(not links, f"there is still {links}")
    return "nothing is left"


def static_binary(machine, runtime, *_):
    """Runs the commands of docs/deploy.md as they are, except for the editor, on a tree that never had the package."""
    machine.choose_port()
    for path in (STATIC, *(ROOT / "systemd").glob("adriaticum.*")):
        shutil.copy(path, machine.root / "root")
    machine.run("sh", "-euc", "cd /root\n" + commands("On other systems", "sh"))
    for unit in ("adriaticum.socket", "adriaticum.service"):
        ensure(machine.show(unit, "ActiveState") == "active", f"{unit} is not active:\n{machine.status()}")
        ensure(machine.run("systemctl", "is-enabled", unit).strip() == "enabled", f"{unit} is not enabled")
    machine.run("systemd-analyze", "verify", "--man=no", "adriaticum.service", "adriaticum.socket")
    state = machine.run("stat", "-c", "%U:%G %a", "/var/lib/adriaticum", "/etc/adriaticum/adriaticum.toml").split("\n")
    ensure(state[:2] == ["adriaticum:adriaticum 750", "root:adriaticum 640"], f"owners and modes are {state}")

    editor, *others = commands("Deployment", "", "The next steps:").splitlines()
    ensure(editor.startswith("editor /etc/adriaticum/adriaticum.toml "), f"the first next step is {editor}")
    settings = machine.read("/etc/adriaticum/adriaticum.toml")
    machine.write("/etc/adriaticum/adriaticum.toml", f'{settings}[runtime]\nurl = "{runtime.url}"\n')
    printed = {command.split("#")[0].strip(): machine.run("sh", "-euc", command) for command in others}
    machine.key = printed['adriaticum keys create "my application"'].strip()
    ensure(machine.complete() == 200, f"no completion:\n{machine.journal()}")
    ensure("/var/lib/adriaticum/adriaticum.db" in printed["adriaticum check"], f"check names no database: {printed}")
    owners = set(machine.run("stat", "-c", "%U", *machine.databases()).split())
    ensure(owners == {"adriaticum"}, f"the database belongs to {owners}")

    # Without the setting, a command uses another database than the service, and says so.
    elsewhere = machine.try_run("sh", "-euc", "cd /tmp; touch empty.toml; adriaticum --config empty.toml keys create other")
    ensure(" in /tmp/adriaticum.db." in elsewhere.stderr, f"keys create does not name its database: {elsewhere.stderr}")
    return "the commands of docs/deploy.md work, completions served"


def commands(section, language, after=""):
    """Returns the first code block in a section of docs/deploy.md, after some text."""
    document = (ROOT / "docs" / "deploy.md").read_text()
    found = re.search(rf"^#+ {section}\n(?:(?!\n## ).)*?{after}.*?\n```{language}\n(.*?)```\n", document, re.MULTILINE | re.DOTALL)
    ensure(found, f"docs/deploy.md has no commands in {section}")
    return found[1]


STEPS = (
    install,
    broken_setting,
    reload,
    optional_runtime,
    kill,
    watchdog,
    restart_under_load,
    upgrade_under_load,
    remove,
    purge,
)


# Checks that need no machine.


def lint(package):
    found = subprocess.run(["lintian", "--allow-root", package], capture_output=True, text=True)
    ensure(not re.search("^E:", found.stdout, re.MULTILINE), f"lintian finds:\n{found.stdout}{found.stderr}")
    print(f"install: lintian finds no error, {len(re.findall('^W:', found.stdout, re.MULTILINE))} warnings", flush=True)


def same_files(package):
    """make install and make deb have separate lists, which must be the same except for the package's own files."""
    folder = MACHINE / "installed"
    shutil.rmtree(folder, ignore_errors=True)
    command = ["make", "-s", "-o", "build", "-o", "generated", "install", f"DESTDIR={folder}", "PREFIX=/usr"]
    subprocess.run(command, cwd=ROOT, check=True)
    by_make = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    listed = subprocess.run(["dpkg-deb", "--fsys-tarfile", package], capture_output=True, check=True).stdout
    listed = subprocess.run(["tar", "t"], input=listed, capture_output=True, check=True).stdout.decode().split()
    by_package = {name.removeprefix("./").removesuffix(".gz") for name in listed if not name.endswith("/")}
    for name in ("deploy.md", "openapi.yaml", "monitoring/alerts.yml", "monitoring/dashboard.json"):
        ensure(f"usr/share/doc/adriaticum/docs/{name}" in by_package, f"the package lacks docs/{name}")
    by_package = {
        re.sub("^lib/", "usr/lib/", name).replace("zsh/vendor-completions", "zsh/site-functions")
        for name in by_package
        if not name.startswith("usr/share/doc/")
    }
    ensure(by_make == by_package, f"make install and make deb differ in {by_make ^ by_package}")
    uninstall = ["make", "-s", "uninstall", f"DESTDIR={folder}", "PREFIX=/usr"]
    subprocess.run(uninstall, cwd=ROOT, check=True)
    left = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    ensure(left == {"etc/adriaticum/adriaticum.toml"}, f"make uninstall leaves {left}")


def completions():
    """Checks that each shell takes its completions, and what they offer."""
    generated = ROOT / "target" / "generated"
    commands = {"create", "help", "list", "rename", "revoke", "rotate", "set"}
    subprocess.run(["zsh", "-n", generated / "_adriaticum"], check=True)
    bash = "source adriaticum.bash; COMP_WORDS=(adriaticum keys ''); COMP_CWORD=2; _adriaticum adriaticum '' keys; " \
           "printf '%s\\n' \"${COMPREPLY[@]}\""
    fish = "source adriaticum.fish; complete -C 'adriaticum --config x keys '"
    for shell, script in [("bash", bash), ("fish", fish)]:
        offered = subprocess.run([shell, "-c", script], cwd=generated, capture_output=True, text=True, check=True).stdout
        words = {line.split("\t")[0] for line in offered.splitlines() if not line.startswith("-")}
        ensure(words == commands, f"{shell} completes keys with {words}")


def tree():
    """Returns a small Debian, made once. If making it was interrupted, it starts again."""
    base, made = MACHINE / "base", MACHINE / "base.made"
    if not made.exists():
        print(f"install: making a Debian {RELEASE} in {base}", flush=True)
        MACHINE.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(base, ignore_errors=True)
        include = "--include=systemd,systemd-sysv,dbus,init-system-helpers"
        log = MACHINE / "debootstrap.log"
        with log.open("wb") as output:
            done = subprocess.run(
                ["debootstrap", "--variant=minbase", include, RELEASE, base, apt_source()], stdout=output, stderr=output
            )
        ensure(done.returncode == 0, f"debootstrap failed:\n{log.read_text()[-2000:]}")
        made.touch()
    return base


def apt_source():
    """Returns the address of the first apt source of this machine."""
    for path in sorted(pathlib.Path("/etc/apt").rglob("*.sources")) + sorted(pathlib.Path("/etc/apt").rglob("*.list")):
        for line in path.read_text().splitlines():
            # URIs: ADDRESS ..., or deb [OPTIONS] ADDRESS SUITE ...
            if found := re.match(r"(?:URIs:|deb(?:\s+\[[^]]*\])?)\s+(\S+/debian/?)(?:\s|$)", line):
                return found[1]
    raise SystemExit("/etc/apt has no source of Debian packages, which debootstrap needs")


def repacked(package, version):
    """Returns the same package with another version, for the upgrade."""
    folder = MACHINE / "repacked"
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run(["dpkg-deb", "-R", package, folder], check=True)
    control = folder / "DEBIAN" / "control"
    control.write_text(re.sub("^Version: .*", f"Version: {version}", control.read_text(), flags=re.MULTILINE))
    # Changes the binary, so that the upgrade replaces it.
    with (folder / "usr/bin/adriaticum").open("ab") as binary:
        binary.write(b"\0")
    later = MACHINE / f"adriaticum_{version}.deb"
    subprocess.run(["dpkg-deb", "--root-owner-group", "-b", folder, later], check=True, capture_output=True)
    return later


def newest(paths):
    found = sorted(paths, key=lambda path: path.stat().st_mtime)
    ensure(found, f"there is no package in {PACKAGES}: make deb")
    return found[-1]


class SlowRuntime(Runtime):
    """Takes 20 ms for every answer, so that there is always a request in progress."""

    def answer(self, body):
        time.sleep(0.02)
        return super().answer(body)


class Machine:
    """A booted tree. Commands run in it through the namespaces of its first process."""

    def __init__(self, base):
        self.root = MACHINE / "root"
        shutil.rmtree(self.root, ignore_errors=True)
        subprocess.run(["cp", "-a", "--reflink=auto", base, self.root], check=True)
        self.log = MACHINE / "console.log"
        self.port = self.key = None
        self.answered = 0

    def __enter__(self):
        command = ["systemd-nspawn", "-q", "-D", self.root, "--register=no", "--keep-unit", "--console=pipe", "--boot"]
        with self.log.open("wb") as log:
            self.nspawn = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | {"SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1"},
                start_new_session=True,
            )
        try:
            has_booted = until(self.has_booted, BOOT_SECONDS)
            ensure(has_booted, f"it did not boot:\n{self.log.read_text(errors='replace')[-3000:]}")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        # Powers the machine off; a second one would kill it.
        self.nspawn.terminate()
        try:
            self.nspawn.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.nspawn.kill()
            self.nspawn.wait()
        shutil.rmtree(self.root, ignore_errors=True)

    def first_process(self):
        """Returns the first process of the tree: nspawn's child, or a child of that; None if it is not there yet."""
        ensure(self.nspawn.poll() is None, f"systemd-nspawn ended:\n{self.log.read_text(errors='replace')}")
        ahead = [self.nspawn.pid]
        for pid in ahead:
            with contextlib.suppress(OSError):
                if pathlib.Path(f"/proc/{pid}/comm").read_text().strip() == "systemd":
                    return pid
                ahead += map(int, pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        return None

    def has_booted(self):
        self.init = self.first_process()
        return self.init and self.try_run("systemctl", "is-system-running").stdout.strip() in ("running", "degraded")

    def try_run(self, *command):
        inside = ["nsenter", "-t", str(self.init), "-m", "-u", "-i", "-p", "-C", "-r", "-w", "env", "-i"]
        inside += ["PATH=/usr/sbin:/usr/bin:/sbin:/bin", "DEBIAN_FRONTEND=noninteractive", "LC_ALL=C"]
        return subprocess.run([*inside, *command], capture_output=True, text=True, stdin=subprocess.DEVNULL)

    def run(self, *command):
        done = self.try_run(*command)
        result = f"{done.stdout}\n{done.stderr}"
        ensure(done.returncode == 0, f"{' '.join(map(str, command))} ended with {done.returncode}:\n{result}")
        return done.stdout

    def install(self, package):
        shutil.copy(package, self.root / "root" / package.name)
        self.run("apt-get", "-y", "-qq", "-o", "Dpkg::Use-Pty=0", "install", f"/root/{package.name}")

    def choose_port(self):
        """Writes an operator's drop-in for another port, before anything is installed."""
        self.port = free_port()
        self.write(
            "/etc/systemd/system/adriaticum.socket.d/port.conf",
            f"[Socket]\nListenStream=\nListenStream=127.0.0.1:{self.port}\nListenStream=[::1]:{self.port}\n",
        )

    def path(self, inside):
        return self.root / inside.removeprefix("/")

    def write(self, inside, text):
        path = self.path(inside)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def read(self, inside):
        return self.path(inside).read_text()

    def exists(self, inside):
        return self.path(inside).exists()

    def databases(self):
        found = self.path("/var/lib/adriaticum").glob("adriaticum.db*")
        return [f"/var/lib/adriaticum/{path.name}" for path in found]

    def show(self, unit, name):
        return self.run("systemctl", "show", "--value", "-p", name, unit).strip()

    def pid(self):
        """Returns the pid of the service inside the machine."""
        return int(self.show("adriaticum.service", "MainPID"))

    def outside(self, inside):
        """Returns the pid on this host of a process in the machine."""
        for path in pathlib.Path("/proc").glob("[0-9]*/status"):
            with contextlib.suppress(OSError):
                text = path.read_text()
                numbers = re.search(r"^NSpid:\s+(.*)$", text, re.MULTILINE)[1].split()
                if len(numbers) == 2 and int(numbers[1]) == inside and "adriaticum" in text:
                    return int(numbers[0])
        raise SystemExit(f"there is no process {inside} in the machine")

    def starts(self):
        return self.run("journalctl", "-u", "adriaticum", "--no-pager").count("Starting adriaticum.service")

    def status(self):
        return self.try_run("systemctl", "status", "--no-pager", "-n", "20", "adriaticum.service").stdout

    def journal(self):
        return self.run("journalctl", "--no-pager", "-n", "40", "-u", "adriaticum", "-u", "adriaticum.socket")

    def wait_for(self, condition, what):
        ensure(until(condition, PATIENCE), f"timeout while waiting for: {what}\n{self.journal()}")

    def connect(self, timeout=PATIENCE, host="127.0.0.1"):
        return contextlib.closing(http.client.HTTPConnection(host, self.port, timeout=timeout))

    def complete(self, timeout=PATIENCE, host="127.0.0.1"):
        with self.connect(timeout, host) as connection:
            status = ask(connection, self.key, QUESTION).status
        self.answered += status == 200
        return status


class Load:
    """Clients that send requests without a pause. Half of them make a new connection for every request, and none of their
    requests may fail. The others keep their connection, as most clients do: if it is closed before the first byte of an
    answer, they retry once on a new one."""

    def __init__(self, machine):
        self.machine = machine
        self.lock = threading.Lock()
        self.answers = {"new": 0, "kept": 0}
        self.again = 0
        self.slowest = 0.0
        self.failures = []
        self.done = threading.Event()
        self.threads = [threading.Thread(target=self.guarded, args=(kind,)) for kind in ("new", "kept") * (CLIENTS // 2)]

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *error):
        self.done.set()
        for thread in self.threads:
            thread.join()
        self.machine.answered += sum(self.answers.values())
        if not any(error):
            self.ensure_nothing_failed()

    def __str__(self):
        new, kept = self.answers["new"], self.answers["kept"]
        return (
            f"{new} requests on new connections and {kept} on kept ones, 0 failed ({self.again} kept connections were"
            f" closed while idle), the slowest {self.slowest:.2f} s"
        )

    def ensure_nothing_failed(self):
        ensure(not self.failures, f"{len(self.failures)} failed: {self.failures[:5]}\n{self.machine.journal()}")

    def guarded(self, kind):
        try:
            while not self.done.is_set():
                self.use_a_connection(kind)
        except Exception as error:  # Any error here means that a request failed.
            with self.lock:
                self.failures.append(repr(error))

    def count(self, kind, status, began):
        with self.lock:
            self.slowest = max(self.slowest, time.monotonic() - began)
            if status == 200:
                self.answers[kind] += 1
            else:
                self.failures.append(f"status {status}")

    def use_a_connection(self, kind):
        with self.machine.connect() as connection:
            for asked in itertools.count():
                began = time.monotonic()
                try:
                    status = ask(connection, self.machine.key, QUESTION).status
                except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError):
                    if asked == 0:
                        raise
                    with self.lock:
                        self.again += 1
                    return
                self.count(kind, status, began)
                # Without a socket, the service announced that it closes the connection.
                if kind == "new" or connection.sock is None or self.done.is_set():
                    return

    def wait_for_more(self, answers):
        wanted = sum(self.answers.values()) + answers
        self.machine.wait_for(lambda: self.failures or sum(self.answers.values()) >= wanted, "more answers")
        self.ensure_nothing_failed()


if __name__ == "__main__":
    sys.exit(main())
