"""llama.cpp's server on loopback: the runtime of `make run`.

    server.py MODEL.gguf PORT

Port 0 means any free port. When it is ready, it prints its address on standard output. Errors go to standard error.
SIGTERM ends it at once.
"""

import os
import signal
import sys

# OpenMP's threads spin while they wait for each other. If other programs need the cores, the spinning threads keep the
# ones they wait for from running. On two cores, beside two busy processes, 64 tokens take 4 to 26 s with the default and
# 2 to 4 s with this; without other load they take 1 s with either.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import xllamacpp  # noqa: E402  (it reads the environment)

# The context that the model was trained with.
CONTEXT = 8192

# Completions that run at once; others wait.
SLOTS = 4


def main():
    # The gateway ends first, so there is nothing to complete and nothing to save.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    params = xllamacpp.CommonParams()
    params.model.path = sys.argv[1]
    params.model_alias = {"adriaticum"}
    params.hostnames = ["127.0.0.1"]
    params.port = int(sys.argv[2])
    # Each slot has its own context. With a shared one, two long prompts at once make both fail.
    params.n_parallel = SLOTS
    params.n_ctx = SLOTS * CONTEXT
    # With the default batch of 2048 tokens, a long prompt blocks the other completions for many seconds.
    params.n_batch = 512
    # By default, up to 8 GiB of earlier prompts would stay in memory.
    params.cache_ram_mib = 0
    params.cache_idle_slots = False
    # By default, any web page in a browser on this machine could use it.
    params.cors_origins = "localhost"
    params.ui = False
    params.endpoint_slots = False
    # Errors only.
    params.verbosity = 1
    # The server stops when this object is destroyed.
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
