"""llama.cpp's server on loopback: the runtime of `make run`.

    server.py MODEL.gguf PORT

Port 0 is any that is free. Once it is ready, it prints its address on standard output; what goes wrong is told on
standard error. SIGTERM ends it at once.
"""

import os
import signal
import sys

# OpenMP's threads spin while they wait for each other, and where other programs want the cores, that keeps from
# running what they wait for. On two cores, beside two busy processes, 64 tokens take 4 to 26 s with the default and
# 2 to 4 s with this; alone they take 1 s with either.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import xllamacpp  # noqa: E402  (it reads the environment)

# As much as the model was trained for.
CONTEXT = 8192

# Completions that are run at once; more of them wait.
SLOTS = 4


def main():
    # What it was started for ends first, so there is nothing to finish and nothing to keep.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    params = xllamacpp.CommonParams()
    params.model.path = sys.argv[1]
    params.model_alias = {"adriaticum"}
    params.hostnames = ["127.0.0.1"]
    params.port = int(sys.argv[2])
    # Each slot has a whole context of its own. In a shared one, two long prompts at once make both fail.
    params.n_parallel = SLOTS
    params.n_ctx = SLOTS * CONTEXT
    # With the default of 2048 tokens at once, a long prompt stops the other completions for many seconds.
    params.n_batch = 512
    # Prompts that no slot holds any more would be kept, up to 8 GiB of them.
    params.cache_ram_mib = 0
    params.cache_idle_slots = False
    # The default lets any page that is open in a browser here ask and read.
    params.cors_origins = "localhost"
    params.ui = False
    params.endpoint_slots = False
    # Errors only.
    params.verbosity = 1
    # It stops when it is dropped.
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
