"""The version of a build: two builds of one version could not be told apart."""

import os
import pathlib
import shutil
import subprocess
import tempfile

from service import ROOT


def a_commit_that_is_not_a_release_is_in_the_version():
    with tempfile.TemporaryDirectory() as folder:
        script = pathlib.Path(folder, "packaging", "version")
        script.parent.mkdir()
        shutil.copy(ROOT / "packaging" / "version", script)
        pathlib.Path(folder, "Cargo.toml").write_text('[package]\nversion = "1.2.3"\n')
        environment = {name: value for name, value in os.environ.items() if name != "GIT_DIR"}
        environment |= {"GIT_CONFIG_GLOBAL": "/dev/null", "ADRIATICUM_VERSION": ""}

        def run(*command, **variables):
            return subprocess.run(command, cwd=folder, env=environment | variables, capture_output=True, text=True, check=True).stdout.strip()

        def version(**variables):
            return run("sh", script, **variables)

        assert (version(), version(ADRIATICUM_VERSION="9")) == ("1.2.3", "9"), "without a repository"
        # The tests may run on a copy of the sources, on a host without git.
        if shutil.which("git"):
            commit = ("git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--allow-empty", "-qm", "x")
            run("git", "init", "--quiet")
            run(*commit)
            expected = f"1.2.3+git.{run('git', 'rev-parse', '--short=12', 'HEAD')}"
            assert version() == expected
            run("git", "tag", "v1.2.2")
            assert version() == expected, "the tag of another version"
            run("git", "tag", "v1.2.3")
            assert version() == "1.2.3"
            run(*commit)
            assert version() != "1.2.3", "after the release"
