"""Downloads, before the steps of `make test-all` that need them, the model and its runtime and, as root, a Debian tree.

    python3 tests/outside/downloads.py
"""

import os

import install
import real_model
from service import ROOT


def main():
    os.chdir(ROOT)
    real_model.prepare()
    if os.geteuid() == 0:
        install.tree()


if __name__ == "__main__":
    main()
