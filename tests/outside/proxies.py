"""Tests the configurations of nginx and Caddy in docs/deploy.md, and of HAProxy in docs/cluster.md, in front of the release binary.

    python3 tests/outside/proxies.py

Only the ports, the certificate and the socket are replaced.
"""

import contextlib
import functools
import http.client
import pathlib
import re
import shutil
import ssl
import subprocess
import tempfile
import time

from service import ROOT, SILENT, START_SECONDS, Runtime, Service, ask, conversation, ensure, free_port, listens, send, until

HOST = "llm.example.org"
CONSOLE = f"console.{HOST}"

LARGEST_BODY = 262_144


def main():
    with tempfile.TemporaryDirectory(prefix="adriaticum-proxies-") as name, Runtime() as runtime:
        folder = pathlib.Path(name)
        # nginx drops root's rights, and still has to reach the socket.
        folder.chmod(0o755)
        make_certificate(folder)
        for proxy in (nginx, caddy, haproxy):
            own = folder / proxy.__name__
            own.mkdir()
            try_out(proxy, own, runtime)
            print(f"proxies: {proxy.__name__} as documented: a completion, the service's own 413, the console by HTTPS, "
                  "no other host", flush=True)


def try_out(proxy, folder, runtime):
    service = Service(folder, runtime, api_hosts=HOST, console_host=CONSOLE, trusted_proxies="unix,127.0.0.1")
    port, unix = free_port(), folder / "adriaticum.sock"
    if proxy is not haproxy:
        # nginx is not in the group of the service.
        service.environment |= {"ADRIATICUM_LISTEN": f"unix:{unix}", "ADRIATICUM_SOCKET_MODE": "0666"}
    service.start()
    command = proxy(folder, port, unix, service.port)
    service.port, service.connection = port, functools.partial(Tls, "127.0.0.1", port, timeout=START_SECONDS)
    log = folder / "proxy.log"
    with log.open("wb") as output:
        running = subprocess.Popen(command, stdout=output, stderr=output, env={"HOME": str(folder), "PATH": "/usr/sbin:/usr/bin"})
    try:
        ensure(until(lambda: listens(port) or running.poll(), START_SECONDS) and running.poll() is None,
               f"{proxy.__name__} does not start:\n{log.read_text()}")
        response = complete(service, "Still there?")
        ensure(response.status == 200, f"{proxy.__name__}: {response.status} {response.text}\n{log.read_text()}")
        response = complete(service, "x" * LARGEST_BODY)
        ensure(response.status == 413 and "request_id" in response.text,
               f"{proxy.__name__} gives {response.status} of its own: {response.text[:300]}")
        page = service.fetch("/sign-in", CONSOLE)
        ensure(page.status == 200 and page.headers["strict-transport-security"],
               f"{proxy.__name__}: the console does not know that the client came by HTTPS: {page.status} {page.headers}")
        other = service.fetch("/sign-in")
        ensure(other.status in (200, 421) and "Adriaticum" not in other.text, f"{proxy.__name__} passes another host on: {other.status}")
        seconds = leave(service, runtime, proxy.__name__)
        status = complete(service, "The next one").status
        ensure(status == 200, f"{proxy.__name__}: after a client has left, the next one gets {status}")
        print(f"proxies: {proxy.__name__}: the runtime's call ended {1000 * seconds:.0f} ms after the client left", flush=True)
    finally:
        running.terminate()
        running.wait()
        service.kill()


def complete(service, content):
    with contextlib.closing(service.connection()) as connection:
        return ask(connection, service.key, conversation(content), Host=HOST)


def leave(service, runtime, name):
    """Closes a connection whose request runs, and returns the time until the runtime sees the end of its call."""
    runtime.answer = lambda _body: (SILENT, None)
    calls, ended = len(runtime.calls), len(runtime.ended)
    with contextlib.closing(service.connection()) as connection:
        send(connection, service.key, conversation("Nobody waits for it"), Host=HOST)
        ensure(until(lambda: len(runtime.calls) > calls), f"{name}: the request does not reach the runtime")
        left = time.monotonic()
    ensure(until(lambda: len(runtime.ended) > ended), f"{name} does not pass on that the client has left")
    runtime.answer = runtime.echo
    return runtime.ended[-1] - left


class Tls(http.client.HTTPConnection):
    """Uses the host name of the test for SNI, and accepts its certificate."""

    def connect(self):
        super().connect()
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        self.sock = context.wrap_socket(self.sock, server_hostname=HOST)


def nginx(folder, port, unix, _):
    lines = put_in(documented("# nginx"), {
        "unix:/run/adriaticum.sock": f"unix:{unix}",
        "listen 443 ssl": f"listen 127.0.0.1:{port} ssl",
        "/etc/ssl/llm.example.org.pem": f"{folder.parent}/cert.pem",
        "/etc/ssl/private/llm.example.org.key": f"{folder.parent}/key.pem",
    })
    paths = "".join(
        f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    config = folder / "nginx.conf"
    config.write_text(
        f"daemon off; pid {folder}/pid; error_log stderr; events {{}}\nhttp {{ access_log off; {paths}\n{lines} }}\n"
    )
    return ["nginx", "-e", "stderr", "-c", config]


def caddy(folder, port, unix, _):
    certificate = f"tls {folder.parent}/cert.pem {folder.parent}/key.pem"
    lines = put_in(documented("# Caddy"), {
        "llm.example.org, console.llm.example.org {":
            f"https://llm.example.org:{port}, https://console.llm.example.org:{port} {{\n bind 127.0.0.1\n {certificate}",
        "/run/adriaticum.sock": str(unix),
    })
    config = folder / "Caddyfile"
    config.write_text(f"{{\n admin off\n auto_https disable_redirects\n}}\n{lines}")
    return ["caddy", "run", "--adapter", "caddyfile", "--config", config]


def haproxy(folder, port, _, service_port):
    lines = put_in(documented("defaults", "cluster.md"), {
        "bind :443": f"bind 127.0.0.1:{port}",
        "/etc/haproxy/llm.example.org.pem": f"{folder.parent}/both.pem",
        "server a 10.0.0.21:8080": f"server a 127.0.0.1:{service_port}",
        "    server b 10.0.0.22:8080\n": "",
    })
    config = folder / "haproxy.cfg"
    config.write_text(lines)
    return ["haproxy", "-db", "-f", config]


def documented(first_line, page="deploy.md"):
    text = (ROOT / "docs" / page).read_text()
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return next(block for block in blocks if block.startswith(first_line))


def put_in(lines, places):
    for place, value in places.items():
        ensure(place in lines, f"the documentation does not have {place!r} any more")
        lines = lines.replace(place, value)
    return lines


def make_certificate(folder):
    key, cert = folder / "key.pem", folder / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={HOST}"]
    subprocess.run([*command, "-keyout", key, "-out", cert], check=True, capture_output=True)
    (folder / "both.pem").write_bytes(key.read_bytes() + cert.read_bytes())
    for path in folder.glob("*.pem"):
        path.chmod(0o644)


if __name__ == "__main__":
    missing = [name for name in ("nginx", "caddy", "haproxy", "openssl") if not shutil.which(name)]
    ensure(not missing, f"{', '.join(missing)} can't be found")
    main()
