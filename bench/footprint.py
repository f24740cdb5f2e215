"""Measures the memory of a connection that has not sent anything yet, plain and with TLS.

    python3 bench/footprint.py
"""

import contextlib
import functools
import pathlib
import socket
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests" / "outside"))
from service import Runtime, Service  # noqa: E402
from tls import NAME, Secured, SecuredService  # noqa: E402

CONNECTIONS = 1000


def connections(service, connect):
    """Returns the idle memory in MiB, and the memory of an idle connection in KiB."""
    with service, contextlib.ExitStack() as stack:
        service.ensure_it_still_answers()
        idle = service.status("VmRSS")
        for _ in range(CONNECTIONS):
            stack.enter_context(connect(socket.create_connection(("127.0.0.1", service.port), 10)))
        # This request comes last, so its answer shows that all connections were accepted.
        service.ensure_it_still_answers()
        return idle / 1024, (service.status("VmRSS") - idle) / CONNECTIONS


def main():
    with Runtime() as runtime, tempfile.TemporaryDirectory(prefix="adriaticum-bench-") as name:
        folder = pathlib.Path(name)
        secured = Secured(folder)
        shake_hands = functools.partial(secured.client.wrap_socket, server_hostname=NAME)
        idle, plain = connections(Service(folder, runtime), lambda client: client)
        idle_secured, session = connections(SecuredService(folder / "secured", runtime, secured), shake_hands)
    print(f"idle memory        {idle:6.2f} MiB")
    print(f"  with TLS         {idle_secured:6.2f} MiB")
    print(f"idle connection    {plain:6.1f} KiB")
    print(f"  with TLS         {session:6.1f} KiB")


if __name__ == "__main__":
    main()
