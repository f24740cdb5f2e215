"""Runs the container image of `make image` without a container engine: unpacked, in a chroot, as its own user (as root).

    python3 tests/outside/image.py

The network is the host's. Everything else is the image's: files, user, folder, environment, command.
"""

import json
import os
import pathlib
import platform
import signal
import sqlite3
import subprocess
import tarfile
import tempfile

from service import REPLY_SECONDS, ROOT, Runtime, Service, ensure

ARCHIVE = ROOT / "target" / f"image-{'arm64' if platform.machine() == 'aarch64' else 'amd64'}.tar"


def unpack(archive, folder):
    """Unpacks all layers, with their owners, and returns the image's configuration."""
    with tarfile.open(archive) as image:
        manifest = json.load(image.extractfile("manifest.json"))[0]
        for name in manifest["Layers"]:
            with tarfile.open(fileobj=image.extractfile(name)) as layer:
                layer.extractall(folder, numeric_owner=True)
        return json.load(image.extractfile(manifest["Config"]))["config"]


class Contained(Service):
    """The image's command in its files, with the settings that an operator gives with --env."""

    def __init__(self, root, config, runtime, **settings):
        super().__init__(root.parent, runtime)
        self.root, self.config = root, config
        self.database = root / "data" / "adriaticum.db"
        settings = {"runtime_url": runtime.url, "listen": f"0.0.0.0:{self.port}"} | settings
        self.environment = dict(pair.split("=", 1) for pair in config["Env"])
        self.environment |= {f"ADRIATICUM_{name.upper()}": str(value) for name, value in settings.items()}

    def enter(self):
        user, _, group = self.config["User"].partition(":")
        os.chroot(self.root)
        os.chdir(self.config["WorkingDir"])
        os.setgroups([])
        os.setgid(int(group))
        os.setuid(int(user))

    def start(self):
        with self.log.open("wb") as log:
            command = self.config["Entrypoint"] + self.config["Cmd"]
            self.process = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log, preexec_fn=self.enter)

    def run(self, *arguments, **options):
        return subprocess.run([*self.config["Entrypoint"], *arguments], env=self.environment, capture_output=True, text=True,
                              timeout=REPLY_SECONDS, preexec_fn=self.enter, **options)


def main():
    ensure(os.geteuid() == 0, "image.py changes the root folder and the user, which needs root: sudo make test-install")
    ensure(ARCHIVE.exists(), f"{ARCHIVE} does not exist: make image")
    with tempfile.TemporaryDirectory(prefix="adriaticum-image-") as name, Runtime() as runtime:
        folder = pathlib.Path(name)
        # mkdtemp's folder is its owner's alone, and the service has another user.
        folder.chmod(0o755)
        root = folder / "root"
        root.mkdir()
        config = unpack(ARCHIVE, root)
        ensure(sorted(path.name for path in root.iterdir()) == ["adriaticum", "data", "usr"], "the image has other files")
        zones = [path.name for path in (root / "usr" / "share").iterdir()]
        ensure(zones == ["zoneinfo"], f"the image has other files: {zones}")
        ensure("0" not in config["User"].split(":"), f"the image runs as {config['User']}")
        ensure("ADRIATICUM_LISTEN=0.0.0.0:8080" in config["Env"] and "8080/tcp" in config["ExposedPorts"], f"odd: {config}")
        ensure("/data" in config["Volumes"], f"the image has no volume: {config}")
        service = Contained(root, config, runtime, console_host="console.test", api_hosts="api.test,127.0.0.1",
                            time_zone="Europe/Zagreb")
        for _ in ("first", "after a restart with the same volume"):
            with service:
                service.wait_until_it_answers()
                service.ensure_it_still_answers()
                ensure(service.fetch("/sign-in", "console.test").status == 200, "the console does not answer")
                ensure(service.fetch("/readyz", "console.test").status == 200, "it is not ready")
                checked = service.run("check")
                ensure(checked.returncode == 0, f"check: {checked.stdout}{checked.stderr}")
                code = service.stop(signal.SIGTERM)
                ensure(code == 0, f"exit code {code}:\n{service.last_logged()}")
        with sqlite3.connect(f"file:{service.database}?mode=ro", uri=True) as database:
            zone = database.execute("SELECT name, tzdata IS NOT NULL FROM time_zone").fetchone()
            ensure(zone == ("Europe/Zagreb", 1), f"the database has the zone {zone}")
            rows = database.execute("SELECT count(*) FROM usage WHERE status = 200").fetchone()[0]
        ensure(rows == 2, f"{rows} rows in the volume's ledger")
        ensure(service.database.stat().st_uid == int(config["User"].split(":")[0]), "the database has another owner")
    print(f"image, {ARCHIVE.stat().st_size / 2**20:.2f} MiB: completions as user {config['User']}, 2 rows in its volume")


if __name__ == "__main__":
    main()
