"""Other gateways to compare with, at pinned versions, installed on demand into var/peers.

None of them has a ledger like ours. Each is started in its cheapest configuration and, if it has a ledger, with that too.
A peer that cannot be installed is reported and left out.
"""

import dataclasses
import os
import secrets
import string
import subprocess

from measure import Unfit
from subjects import ROOT, Subject, free_port

PEERS = ROOT / "var" / "peers"
# A strong key, because LiteLLM does not start with a weak one.
KEY = f"sk-{secrets.token_hex(32)}"


@dataclasses.dataclass
class Peer:
    """How a peer is installed and started. $port, $other_port, $upstream (a port), $key and $peers are filled in."""

    name: str
    version: str
    install: str  # shell command, run in var/peers
    size: str  # the installed files, without an interpreter
    command: str
    files: dict = dataclasses.field(default_factory=dict)
    environment: dict = dataclasses.field(default_factory=dict)
    headers: dict = dataclasses.field(default_factory=dict)
    prepare: str = "true"  # shell command before the first start, run in the subject's folder
    written: str = "nothing"  # what it stores of a request, and when


CRABLLM = """
listen = "127.0.0.1:$port"
[providers.upstream]
kind = "openai"
base_url = "http://127.0.0.1:$upstream/v1"
api_key = "none"
models = ["adriaticum"]
[[keys]]
name = "benchmark"
key = "$key"
models = ["adriaticum"]
"""
CRABLLM_LEDGER = CRABLLM + """
[storage]
kind = "sqlite"
path = "crabllm.db"
[extensions]
usage = {}
audit = {}
"""
CRABLLM_INSTALL = "cargo install --quiet --locked --root . crabllm --version $version --features storage-sqlite"

SMOL_KEY = """
import hashlib, smol_llm_proxy.database as database
database.init_db()
with database.get_db() as connection:
    connection.execute("INSERT INTO api_keys (key_hash, name, rpm_limit, tpm_limit) VALUES (?, 'benchmark', ?, ?)",
        (hashlib.sha256(b"$key").hexdigest(), 10**12, 10**12))
"""

TABLE = [
    Peer("crabllm, no ledger", "0.0.25", CRABLLM_INSTALL, "bin/crabllm",
         "$peers/bin/crabllm serve --config crabllm.toml", {"crabllm.toml": CRABLLM}, {"RUST_LOG": "warn"}),
    Peer("crabllm, its SQLite ledger", "0.0.25", CRABLLM_INSTALL, "bin/crabllm",
         "$peers/bin/crabllm serve --config crabllm.toml", {"crabllm.toml": CRABLLM_LEDGER}, {"RUST_LOG": "warn"},
         written="sums by key before the answer, a row after it, in SQLite"),
    Peer("onwards, no ledger", "1.2.0", "cargo install --quiet --locked --root . onwards --version $version", "bin/onwards",
         "$peers/bin/onwards -p $port --metrics-port $other_port -f targets.json",
         {"targets.json": '{"targets": {"adriaticum": {"url": "http://127.0.0.1:$upstream", "keys": ["$key"]}}}'},
         {"RUST_LOG": "warn", "ONWARDS_SHUTDOWN_DELAY_SECS": "0"}),
    Peer("Portkey, no ledger", "1.15.2",
         "npm install --silent --no-audit --no-fund --prefix portkey @portkey-ai/gateway@$version", "portkey/node_modules",
         "node $peers/portkey/node_modules/@portkey-ai/gateway/build/start-server.js --port=$port --headless",
         environment={"TRUSTED_CUSTOM_HOSTS": "127.0.0.1"},
         headers={"x-portkey-provider": "openai", "x-portkey-custom-host": "http://127.0.0.1:$upstream/v1"}),
    Peer("smol-llm-proxy, written after the answer", "0.4.3",
         "python3 -m venv smol && smol/bin/pip install --quiet smol-llm-proxy==$version", "smol/lib",
         "$peers/smol/bin/smol-llm-proxy",
         {"config.yaml": "servers: [{name: upstream, url: 'http://127.0.0.1:$upstream', models: [adriaticum]}]", "key.py": SMOL_KEY},
         {"ADMIN_KEY": "admin", "PROXY_PORT": "$port", "PROXY_HOST": "127.0.0.1", "DB_PATH": "proxy.db", "CONFIG_PATH": "config.yaml",
          "PROXY_MAX_CONNECTIONS": "256", "PROXY_MAX_KEEPALIVE": "256"},
         prepare="$peers/smol/bin/python key.py", written="a row after the answer, in SQLite"),
    Peer("LiteLLM, one worker, no ledger", "1.106.2",
         "python3 -m venv litellm && litellm/bin/pip install --quiet 'litellm[proxy]==$version'", "litellm/lib",
         "$peers/litellm/bin/litellm --config config.yaml --host 127.0.0.1 --port $port --num_workers 1 --telemetry False",
         {"config.yaml": "model_list: [{model_name: adriaticum, litellm_params: {model: openai/adriaticum,"
                         " api_base: 'http://127.0.0.1:$upstream/v1', api_key: none}}]"},
         # Otherwise it downloads a list of prices at its start.
         {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR", "LITELLM_MASTER_KEY": "$key"}),
]


def installed(folder, upstream):
    """Yields the peers as subjects, and installs missing ones first."""
    PEERS.mkdir(parents=True, exist_ok=True)
    for number, peer in enumerate(TABLE):
        try:
            yield subject(peer, folder / f"peer{number}", upstream)
        except Unfit as reason:
            print(f"left out: {reason}")


def subject(peer, folder, upstream):
    folder.mkdir()
    port = free_port()
    values = {"port": port, "other_port": free_port(), "upstream": upstream.port, "key": KEY, "peers": PEERS, "version": peer.version}

    def fill(text):
        return string.Template(text).substitute(values)

    # The mark has the version in its name, so a new version in the table is installed.
    mark = PEERS / f"{peer.size.replace('/', '-')}-{peer.version}"
    if not mark.exists():
        print(f"installing {peer.name} {peer.version}", flush=True)
        run(fill(peer.install), PEERS, f"{peer.name} cannot be installed here")
        mark.touch()
    for name, text in peer.files.items():
        (folder / name).write_text(fill(text))
    environment = os.environ | {name: fill(value) for name, value in peer.environment.items()}
    run(fill(peer.prepare), folder, f"{peer.name} cannot be prepared", environment)
    headers = {"Authorization": f"Bearer {KEY}"} | {name: fill(value) for name, value in peer.headers.items()}
    return Subject(peer.name, folder, ["sh", "-c", "exec " + fill(peer.command)], port, environment, headers,
                   [PEERS / peer.size], peer.version)


def run(line, folder, otherwise, environment=None):
    done = subprocess.run(line, shell=True, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise Unfit(f"{otherwise}: {(done.stderr or done.stdout).strip()[-500:]}")
