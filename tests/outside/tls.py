"""Tests TLS from outside: sslscan finds nothing weak.

    python3 tests/outside/tls.py

tests/conformance/run.py --tls checks the contract over TLS, slow_clients.py slow handshakes.
"""

import contextlib
import http.client
import pathlib
import socket
import ssl
import subprocess
import tempfile
import xml.etree.ElementTree

from service import REPLY_SECONDS, Runtime, Service, ensure

NAME = "api.test"


class Secured:
    """A certificate, and clients that trust it and no other."""

    def __init__(self, folder, kind=("ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")):
        self.certificate, self.key = folder / "cert.pem", folder / "key.pem"
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", *kind, "-nodes", "-days", "30", "-subj", f"/CN={NAME}",
             "-addext", f"subjectAltName=DNS:{NAME},IP:127.0.0.1", "-keyout", self.key, "-out", self.certificate],
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


def main():
    with tempfile.TemporaryDirectory(prefix="adriaticum-tls-") as name, Runtime() as runtime:
        folder = pathlib.Path(name)
        with SecuredService(folder / "scanned", runtime, Secured(folder)) as service:
            scan(service)
            service.ensure_it_ends_well()


if __name__ == "__main__":
    main()
