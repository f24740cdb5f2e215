"""The attackers of attacks.py, each in a process of its own until it is killed.

    python3 tests/outside/attackers.py NAME PORT [OPTIONS]

OPTIONS is a JSON object: the arguments of the function called NAME. An attacker prints a line when it is in place.
Every connection comes from 127.0.0.1, unless an attacker has other addresses.
"""

import asyncio
import contextlib
import itertools
import json
import random
import resource
import secrets
import socket
import ssl
import sys

COMPLETIONS = "/v1/chat/completions"
BODY = 262_144
# Its head decides that the answer is 404.
REFUSED = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


def unknown_key():
    """A key of the right form that does not exist."""
    return f"adr_{secrets.token_hex(24)}"


def head(key=None, framing="Content-Length: 2", method="POST", path=COMPLETIONS, host="localhost"):
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", "Content-Type: application/json", framing]
    if key:
        lines.append(f"Authorization: Bearer {key}")
    return "\r\n".join([*lines, "", ""]).encode()


def in_place():
    print("in place", flush=True)


def connect(port, address="127.0.0.1"):
    return asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))


async def until_closed(reader):
    while await reader.read(65536):
        pass


async def hold(port, payloads, pause, sources=("127.0.0.1",)):
    """Holds a connection for each payload, which it sends first. A connection that ends is opened again after a pause.

    The connections come from the sources in turn.
    """
    async def send(payload, source):
        with contextlib.suppress(OSError, TimeoutError):
            reader, writer = await connect(port, source)
            writer.write(payload)
            await asyncio.wait_for(writer.drain(), 5)
            return reader, writer

    async def keep(payload, source, connection):
        while True:
            if connection:
                reader, writer = connection
                with contextlib.suppress(OSError):
                    await until_closed(reader)
                writer.close()
            await asyncio.sleep(pause * (0.5 + random.random()))
            connection = await send(payload, source)

    connections = await asyncio.gather(*map(send, payloads, itertools.cycle(sources)))
    in_place()
    await asyncio.gather(*map(keep, payloads, itertools.cycle(sources), connections))


async def silent(port, connections, sources):
    """Sends nothing, and opens at once what is closed."""
    await hold(port, [b""] * connections, 0, sources)


async def one_byte(port, byte, connections):
    await hold(port, [bytes([byte])] * connections, 1)


async def unfinished_bodies(port):
    """300 bodies that lack their last byte, more than 64 MiB, and smaller ones for what room is left."""
    def payload(size):
        return head(unknown_key(), f"Content-Length: {BODY}") + b" " * size

    await hold(port, [payload(BODY - 1) for _ in range(300)] + [payload(BODY >> n) for n in range(1, 11)], 0.2)


async def simultaneous_hellos(port, hello, connections, sources):
    """Begins all handshakes at once."""
    await hold(port, [bytes.fromhex(hello)] * connections, 1, sources)


async def pipelined_404s(port, groups, reads):
    """Pipelines requests that get 404, and reads the answers twice a second or never. Opens again what is closed.

    A group is an address, a number of connections, and how many requests each sends at once.
    """
    async def one(address, number):
        while True:
            with contextlib.suppress(OSError), socket.socket() as connection:
                if not reads:
                    # The kernel takes some 80 answers. With the long segments of the loopback interface it would take 2 MiB.
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 1400)
                connection.setblocking(False)
                connection.bind((address, 0))
                await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
                sent = connection.send(REFUSED * number)
                is_open = True
                while is_open:
                    await asyncio.sleep(0.5)
                    with contextlib.suppress(BlockingIOError):
                        is_open = not reads or connection.recv(1 << 20)
                        # Without reading, only another request shows that the service has closed the connection.
                        more = REFUSED * (number if reads else 1)
                        sent += connection.send(more[sent % len(REFUSED):])
            await asyncio.sleep(0.2)

    tasks = []
    for address, connections, number in groups:
        for _ in range(connections):
            tasks.append(asyncio.create_task(one(address, number)))
            # A connection is blocked before the next one comes.
            await asyncio.sleep(0 if reads else 0.001)
    in_place()
    await asyncio.gather(*tasks)


async def requests(port, connections, key=None, method="POST", path=COMPLETIONS, host="localhost", body="{}", sizes=(0,),
                   address="127.0.0.1", pause=0):
    """Sends requests as fast as they are answered. The key "unknown" is another one in each request.

    White space makes the connections' bodies as long as `sizes`, in turn. A connection that ends is opened again after a pause.
    """
    def sender(size):
        padded = body.ljust(size).encode()

        def request():
            secret = unknown_key() if key == "unknown" else key
            return head(secret, f"Content-Length: {len(padded)}", method, path, host) + padded

        return request

    in_place()
    senders = map(sender, itertools.islice(itertools.cycle(sizes), connections))
    await asyncio.gather(*(repeat(port, address, request, pause) for request in senders))


async def repeat(port, address, request, pause=0):
    """Sends what `request` returns on one connection, as fast as it is answered. Opens the connection again if it ends."""
    while True:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            reader, writer = await connect(port, address)
            with contextlib.closing(writer):
                answer = b""
                while b"connection: close" not in answer:
                    writer.write(request())
                    answer = (await reader.readuntil(b"\r\n\r\n")).lower()
                    length = answer.partition(b"content-length: ")[2].partition(b"\r\n")[0]
                    await reader.readexactly(int(length or 0))
        await asyncio.sleep(pause)


async def wrong_passwords(port, addresses):
    """Guesses the console's password from many addresses, with one connection each."""
    body = "password=a+wrong+password"
    lines = f"Content-Length: {len(body)}\r\nSec-Fetch-Site: same-origin"
    request = head(None, lines, path="/sign-in", host="console.localhost") + body.encode()
    in_place()
    await asyncio.gather(*(repeat(port, f"127.0.1.{number}", lambda: request) for number in range(1, addresses + 1)))


async def abandoned(port, key, body, number):
    """Sends requests and closes their connections at once, in waves."""
    async def one():
        with contextlib.suppress(OSError):
            _, writer = await connect(port)
            writer.write(head(key, f"Content-Length: {len(body)}") + body.encode())
            writer.close()
            await writer.wait_closed()

    in_place()
    while True:
        await asyncio.gather(*(one() for _ in range(number)))
        await asyncio.sleep(0.2)


async def chunk_extensions(port):
    """One connection over TLS at full speed: chunks of one byte, each with an extension of 16,000. With and without a key."""
    chunk = b"1;x=" + b"y" * 16_000 + b"\r\n{\r\n"
    client = ssl.create_default_context()
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    in_place()
    while True:
        for key in (None, unknown_key()):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)) as plain:
                with client.wrap_socket(plain) as connection:
                    connection.sendall(head(key, "Transfer-Encoding: chunked"))
                    while True:
                        connection.sendall(chunk)


def main():
    name, port, options = sys.argv[1], int(sys.argv[2]), json.loads((sys.argv[3:] or ["{}"])[0])
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asyncio.run(globals()[name](port, **options))


if __name__ == "__main__":
    main()
