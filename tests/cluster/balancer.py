"""HAProxy in front of the gateways, with the configuration of docs/cluster.md. Only addresses and the certificate are replaced."""

import subprocess

from proxies import documented, put_in
from service import Service, ensure, free_port, listens, until


class Balancer:
    """Has what clients need of a gateway: a name and connections."""

    name = "HAProxy"
    connection = Service.connection
    client_address = None

    def __init__(self, folder, gateways):
        self.port, self.log = free_port(), folder / "haproxy.log"
        servers = "".join(f"    server {gateway.name} 127.0.0.1:{gateway.port}\n" for gateway in gateways)
        lines = put_in(documented("defaults", "cluster.md"), {
            "bind :443 ssl crt /etc/haproxy/llm.example.org.pem": f"bind 127.0.0.1:{self.port}",
            "    server a 10.0.0.21:8080\n": "",
            "    server b 10.0.0.22:8080\n": servers,
        })
        self.file = folder / "haproxy.cfg"
        self.file.write_text(lines)

    def __enter__(self):
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(["/usr/sbin/haproxy", "-db", "-f", self.file], stdout=log, stderr=log)

        def is_listening():
            ensure(self.process.poll() is None, f"HAProxy ended:\n{self.log.read_text()}")
            return listens(self.port)

        ensure(until(is_listening), f"HAProxy does not listen:\n{self.log.read_text()}")
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
