"""Tests TLS from outside: sslscan finds nothing weak, slow handshakes delay no other client, and under load every request
is answered.

    python3 tests/outside/tls.py

tests/conformance/run.py --tls checks the contract over TLS.
"""

import asyncio
import contextlib
import http.client
import json
import pathlib
import socket
import ssl
import subprocess
import tempfile
import time
import xml.etree.ElementTree

from service import REPLY_SECONDS, Runtime, Service, ensure

NAME = "api.test"
LAGGARDS = 300
# The service ends a handshake after 20 s. The rest is for a busy machine.
HANDSHAKE_SECONDS = 90
LOAD_SECONDS = 300


class Secured:
    """A certificate, and clients that trust it and no other."""

    def __init__(self, folder):
        self.certificate, self.key = folder / "cert.pem", folder / "key.pem"
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "30",
             "-subj", f"/CN={NAME}", "-addext", f"subjectAltName=DNS:{NAME},IP:127.0.0.1",
             "-keyout", self.key, "-out", self.certificate],
            check=True, capture_output=True)
        self.settings = {"tls_cert": self.certificate, "tls_key": self.key}
        self.client = ssl.create_default_context(cafile=self.certificate)
        self.client.sslsocket_class = Plain


class Plain(ssl.SSLSocket):
    """Reports a lost connection like a socket without TLS."""

    def sendall(self, *arguments):
        try:
            return super().sendall(*arguments)
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:
            raise ConnectionResetError from error


def hello_of(client):
    """Returns the first message of a handshake."""
    outgoing = ssl.MemoryBIO()
    session = client.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=NAME)
    with contextlib.suppress(ssl.SSLWantReadError):
        session.do_handshake()
    return outgoing.read()


class SecuredService(Service):
    def __init__(self, folder, runtime, secured, **settings):
        folder.mkdir()
        super().__init__(folder, runtime, **secured.settings, **settings)
        self.secured = secured

    def connection(self, timeout=REPLY_SECONDS):
        return http.client.HTTPSConnection("127.0.0.1", self.port, timeout=timeout, context=self.secured.client)


def scan(service):
    """Checks the service with sslscan."""
    report = subprocess.run(["sslscan", "--xml=-", "--no-colour", f"--sni-name={NAME}", f"127.0.0.1:{service.port}"],
                          capture_output=True, text=True, check=True).stdout
    found = xml.etree.ElementTree.fromstring(report).find("ssltest")
    ensure(found is not None, f"sslscan tested nothing:\n{report}")

    protocols = {f"{p.get('type')} {p.get('version')}": p.get("enabled") for p in found.iter("protocol")}
    ensure(len(protocols) == 6, f"sslscan did not try every version:\n{report}")
    enabled = {name for name, is_enabled in protocols.items() if is_enabled != "0"}
    ensure(enabled == {"tls 1.2", "tls 1.3"}, f"these versions are enabled: {enabled}")
    ciphers = list(found.iter("cipher"))
    ensure({cipher.get("sslversion") for cipher in ciphers} == {"TLSv1.2", "TLSv1.3"}, f"sslscan did not list every cipher:\n{report}")
    for cipher in ciphers:
        name = cipher.get("cipher")
        # sslscan never rates TLS 1.3 ciphers above acceptable.
        ensure(cipher.get("strength") in ("strong", "acceptable"), f"{name} is {cipher.get('strength')}")
        ensure(int(cipher.get("bits")) >= 128, f"{name} has a short key")
        forward = cipher.get("sslversion") == "TLSv1.3" or name.startswith("ECDHE-")
        ensure(forward, f"{name} has no forward secrecy")
    ensure(all(int(group.get("bits")) >= 128 for group in found.iter("group")), f"a group is weak:\n{report}")
    bleeding = [heartbleed.get("vulnerable") for heartbleed in found.iter("heartbleed")]
    ensure(bleeding and set(bleeding) == {"0"}, f"Heartbleed was found, or not tested:\n{report}")
    for renegotiation in found.iter("renegotiation"):
        insecure = renegotiation.get("supported") == "1" and renegotiation.get("secure") != "1"
        ensure(not insecure, f"insecure renegotiation is possible:\n{report}")
    # Debian's sslscan has no compression, so it cannot test whether the service does.
    ensure(compression(service) == 0, "there is compression")
    service.ensure_it_still_answers()
    print(f"sslscan finds nothing weak: {len(ciphers)} ciphers")


def compression(service):
    """Returns the compression method that the service chooses if a client offers deflate before none."""
    client = ssl.create_default_context()
    client.maximum_version = ssl.TLSVersion.TLSv1_2  # later ones have none
    message = hello_of(client)[9:]
    after_session = 34 + 1 + message[34]
    offer = after_session + 2 + int.from_bytes(message[after_session:after_session + 2], "big")
    ensure(message[offer:offer + 2] == b"\1\0", "the compression methods are not where this test expects them")
    message = message[:offer] + b"\2\1\0" + message[offer + 2:]
    message = b"\1" + len(message).to_bytes(3, "big") + message
    with socket.create_connection(("127.0.0.1", service.port), REPLY_SECONDS) as connection:
        connection.sendall(b"\x16\3\1" + len(message).to_bytes(2, "big") + message)
        answer = connection.recv(65536)
    ensure(answer[:1] == b"\x16" and answer[5:6] == b"\2", f"the handshake got no answer: {answer[:20]}")
    message = answer[9:]
    return message[34 + 1 + message[34] + 2]


def lag(service):
    """Opens connections that send nothing, half of a first message, a whole one and nothing more, or one byte at a time.
    One worker still answers other clients, and unfinished handshakes are ended in time."""
    hello = hello_of(service.secured.client)
    service.ensure_it_still_answers()
    threads, memory = service.status("Threads"), service.status("VmRSS")
    address = ("127.0.0.1", service.port)
    with contextlib.ExitStack() as stack:
        def clients(bytes_sent):
            opened = [stack.enter_context(socket.create_connection(address, REPLY_SECONDS)) for _ in range(LAGGARDS)]
            for index, client in enumerate(opened):
                client.sendall(hello[:bytes_sent(index)])
                client.setblocking(False)
            return opened

        began = time.monotonic()
        clients(lambda index: 0)
        halves = clients(lambda index: 1 + index % (len(hello) - 1))
        mute = clients(lambda index: len(hello))
        slow = clients(lambda index: 1)
        sent, slowest, completions = 1, 0, 0
        waiting = set(halves + mute + slow)
        while waiting:
            lasted = time.monotonic() - began
            ensure(lasted < HANDSHAKE_SECONDS, f"{len(waiting)} handshakes are still open after {lasted:.0f} s")
            asked = time.monotonic()
            service.ensure_it_still_answers()
            slowest = max(slowest, time.monotonic() - asked)
            completions += 1
            ensure(service.status("Threads") == threads, "the number of threads changed")
            if sent < len(hello) - 1:
                for client in slow:
                    with contextlib.suppress(OSError):
                        client.send(hello[sent:sent + 1])
                sent += 1
            waiting -= {client for client in waiting if has_ended(client)}
            grown = service.status("VmRSS") - memory
            time.sleep(0.1)  # a pace, not a wait: slow handshakes send one byte per round
        ensure(grown < 4 * LAGGARDS * 24, f"{4 * LAGGARDS} handshakes took {grown} KiB")
    service.ensure_it_ends_well()
    print(f"{4 * LAGGARDS} slow handshakes: {completions} completions, the slowest {slowest * 1000:.0f} ms; "
          f"all unfinished ones ended after {lasted:.0f} s")


def has_ended(client):
    """Returns whether the service has closed the connection; earlier bytes are ignored."""
    try:
        while True:
            if not client.recv(65536):
                return True
    except BlockingIOError:
        return False
    except OSError:
        return True


async def load(service, clients, rounds, each, is_kept):
    """Runs many clients at once, which send `each` requests together. Returns how many requests were answered."""
    body = json.dumps({"model": "adriaticum", "messages": [{"role": "user", "content": "x"}]})
    request = (f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: {service.authorization}\r\n"
               f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}").encode()

    async def connect():
        return await asyncio.open_connection(
            "127.0.0.1", service.port, ssl=service.secured.client, server_hostname=NAME)

    async def client():
        reader, writer = await connect()
        for number in range(rounds):
            if number and not is_kept:
                writer.close()
                reader, writer = await connect()
            writer.write(request * each)
            for _ in range(each):
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                if not head.startswith("HTTP/1.1 200 "):
                    raise OSError(head)
                await reader.readexactly(int(head.lower().partition("content-length: ")[2].partition("\r\n")[0]))
        writer.close()

    await asyncio.wait_for(asyncio.gather(*(client() for _ in range(clients))), LOAD_SECONDS)
    return clients * rounds * each


def answer_under_load(service):
    answered = 0
    for clients in (1, 32, 128):
        for rounds, each, is_kept in ((8, 1, True), (4, 1, False), (2, 4, True)):
            try:
                answered += asyncio.run(load(service, clients, rounds, each, is_kept))
            except (OSError, EOFError, TimeoutError, asyncio.TimeoutError) as error:
                raise SystemExit(f"{clients} clients, {each} requests together, connections kept: {is_kept}: not "
                                 f"every request was answered with 200: {error!r}\n{service.last_logged()}")
    service.ensure_it_ends_well()
    print(f"under load over TLS: {answered} requests, {answered} answers")


def main():
    with tempfile.TemporaryDirectory(prefix="adriaticum-tls-") as name, Runtime() as runtime:
        folder = pathlib.Path(name)
        secured = Secured(folder)
        with SecuredService(folder / "scanned", runtime, secured) as service:
            scan(service)
        with SecuredService(folder / "loaded", runtime, secured, queue=512) as service:
            answer_under_load(service)
        with SecuredService(folder / "lagging", runtime, secured, workers=1) as service:
            lag(service)


if __name__ == "__main__":
    main()
