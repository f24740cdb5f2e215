"""HAProxy in front of the gateways, with the configuration of docs/cluster.md. Only addresses and the certificate are replaced."""

import contextlib
import re
import subprocess

from service import ROOT, Service, ensure, free_port, until

HOST = "llm.example.org"
CONSOLE = f"console.{HOST}"


class Balancer:
    """Has what clients need of a gateway: a name and connections."""

    name = "HAProxy"
    connection = Service.connection
    client_address = None

    def __init__(self, folder, gateways):
        self.port, self.log = free_port(), folder / "haproxy.log"
        blocks = re.findall(r"^```\w*\n(.*?)^```$", (ROOT / "docs" / "cluster.md").read_text(), re.DOTALL | re.MULTILINE)
        block = next(block for block in blocks if "backend gateways" in block)
        block, binds = re.subn(r"bind :443 .*", f"bind 127.0.0.1:{self.port}", block)
        block, servers = re.subn(r"    server \w+ .*\n", "", block)
        ensure(binds == 1 and servers == 2, "docs/cluster.md has another HAProxy configuration than this test knows")
        servers = "".join(f"    server {gateway.name} 127.0.0.1:{gateway.port}\n" for gateway in gateways)
        self.file = folder / "haproxy.cfg"
        self.file.write_text(block + servers)

    def __enter__(self):
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(["/usr/sbin/haproxy", "-db", "-f", self.file], stdout=log, stderr=log)

        def listens():
            ensure(self.process.poll() is None, f"HAProxy ended:\n{self.log.read_text()}")
            with contextlib.suppress(OSError), contextlib.closing(self.connection(1)) as connection:
                connection.connect()
                return True

        until(listens)
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
