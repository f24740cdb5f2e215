"""How large the service is and how soon it answers: the binary, its memory when idle, exec to the first 200.

    python3 bench/footprint.py

The bounds stand beside the figures; the times are the median and the slowest of several starts.
"""

import pathlib
import socket
import statistics
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests" / "outside"))
from service import BINARY, Runtime, Service  # noqa: E402

STARTS = 20


def first_answer(service):
    """Seconds from exec to the first 200."""
    body = b'{"model":"adriaticum","messages":[{"role":"user","content":"x"}]}'
    request = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: {service.authorization}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode() + body
    began = time.perf_counter()
    service.start()
    while True:
        try:
            with socket.create_connection(("127.0.0.1", service.port)) as client:
                client.sendall(request)
                answer = client.recv(65536)
                break
        except ConnectionRefusedError:
            time.sleep(0.0002)
    seconds = time.perf_counter() - began
    if not answer.startswith(b"HTTP/1.1 200"):
        raise SystemExit(f"no completion: {answer[:200]}")
    return seconds


def main():
    starts, idle = [], []
    with Runtime() as runtime:
        for _ in range(STARTS):
            with tempfile.TemporaryDirectory(prefix="adriaticum-bench-") as name:
                service = Service(pathlib.Path(name), runtime)
                try:
                    starts.append(first_answer(service) * 1000)
                    idle.append(service.status("VmRSS") / 1024)
                finally:
                    service.__exit__()
    size = BINARY.stat().st_size / 1024 / 1024
    print(f"binary             {size:6.2f} MiB   (at most 4)")
    print(f"idle memory        {statistics.median(idle):6.2f} MiB   (at most 8; VmRSS after the first completion)")
    print(f"exec to first 200  {statistics.median(starts):6.2f} ms    (at most 50; the slowest of {STARTS}: {max(starts):.2f})")


if __name__ == "__main__":
    main()
