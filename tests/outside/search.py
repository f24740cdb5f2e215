"""Tests the service with a real Search server: Debian's searx, with an offline engine over facts of our own.

    python3 tests/outside/search.py

The results reach the model. If the server or its engine fails, requests get 503 search_unavailable; when it is back, they
succeed again, without a restart.
"""

import contextlib
import os
import pathlib
import sqlite3
import subprocess
import tempfile
import urllib.request

from service import START_SECONDS, Runtime, Service, conversation, ensure, free_port, until

FACTS = {
    "The Velna lighthouse": "The Velna lighthouse is <b>47</b> metres high &amp; made of grey stone.",
    "The ferry to Orsk": "The ferry to Orsk is called the Mirabel. It's painted green.",
    "Lake Ombra": "Lake Ombra is 212 metres deep.",
}

# The words are quoted for FTS5, in which ', ? and other characters are syntax.
SETTINGS = """
general: {{debug: false, instance_name: facts}}
search: {{safe_search: 0, autocomplete: "", default_lang: "", ban_time_on_fail: 0, max_ban_time_on_fail: 0, formats: [html, json]}}
server: {{bind_address: 127.0.0.1, port: {port}, secret_key: of-the-tests, base_url: false, image_proxy: false, method: GET,
         http_protocol_version: "1.0", default_http_headers: {{}}}}
ui: {{static_path: /usr/share/python3-searx/static, templates_path: /usr/share/python3-searx/templates,
     default_theme: oscar, default_locale: "", theme_args: {{oscar_style: logicodev}}}}
outgoing: {{request_timeout: 2.0, pool_connections: 1, pool_maxsize: 1}}
locales: {{en: English}}
doi_resolvers: {{none: "http://127.0.0.1/"}}
default_doi_resolver: none
engines:
  - name: facts
    engine: sqlite
    shortcut: f
    database: {database}
    result_template: default.html
    query_str: >-
      SELECT title, content, 'http://facts.test/' || rowid AS url FROM facts
      WHERE facts MATCH '"' || replace(replace(:query, '"', ' '), ' ', '" OR "') || '"' ORDER BY rank
"""


class Searx:
    def __init__(self, folder):
        self.port = free_port()
        self.log = folder / "searx.log"
        self.database = folder / "facts.db"
        self.settings = folder / "settings.yml"
        self.settings.write_text(SETTINGS.format(port=self.port, database=self.database))
        with contextlib.closing(sqlite3.connect(self.database)) as database:
            database.execute("CREATE VIRTUAL TABLE facts USING fts5 (title, content)")
            database.executemany("INSERT INTO facts VALUES (?, ?)", FACTS.items())
            database.commit()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process = None

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.stop()

    def start(self):
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                ["searx-run"], env=os.environ | {"SEARX_SETTINGS_PATH": str(self.settings)}, stdout=log, stderr=log
            )
        # searx first loads the descriptions of all engines.
        ensure(until(self.finds_a_fact, START_SECONDS), f"searx does not answer:\n{self.log.read_text(errors='replace')}")

    def finds_a_fact(self):
        ensure(self.process.poll() is None, f"searx ended at its start:\n{self.log.read_text(errors='replace')}")
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/search?q=Ombra&format=json", timeout=10) as response:
            return b"212" in response.read()

    def stop(self):
        self.process.kill()
        self.process.wait()


class Model(Runtime):
    """A runtime that shows the prompts it received."""

    @property
    def prompts(self):
        return [[message["content"] for message in call.body["messages"]] for call in self.calls]


def is_grounded(service):
    """Whether the newest completion was."""
    with contextlib.closing(sqlite3.connect(f"file:{service.database}?mode=ro", uri=True)) as database:
        return database.execute("SELECT grounded FROM usage ORDER BY request_id DESC LIMIT 1").fetchone() == (1,)


def expect_answer(service, model, question, *words):
    before = len(model.prompts)
    response = service.ask(conversation(question))
    ensure(response.status == 200, f"{question!r}: {response.status} {response.text}")
    ensure(len(model.prompts) == before + 1, f"{question!r}: the model was asked {len(model.prompts) - before} times")
    prompt = model.prompts[-1]
    ensure(prompt[-1] == question, f"the question was changed: {prompt}")
    for word in words:
        ensure(word in prompt[0], f"{question!r}: {word!r} is not in {prompt[0]!r}")


def expect_unavailable(service, model, when):
    before = len(model.prompts)
    response = service.ask(conversation("How deep is Lake Ombra?"))
    ensure(response.status == 503 and '"search_unavailable"' in response.text, f"{when}: {response.status} {response.text}")
    ensure(len(model.prompts) == before, f"{when}: the model was asked")


def main():
    with tempfile.TemporaryDirectory(prefix="adriaticum-search-") as name:
        folder = pathlib.Path(name)
        with Searx(folder) as searx, Model() as model:
            settings = {"search_url": searx.url, "search_grounding": "always", "search_timeout": 60}
            with Service(folder, model, **settings) as service:
                check(service, model, searx)
                service.ensure_it_ends_well()
    print("searx: found, not found, engine broken, stopped, and back: all as expected")


def check(service, model, searx):
    tried = service.run("check")
    ensure("ok    search" in tried.stdout, f"check says: {tried.stdout}")

    fact = "> The Velna lighthouse is 47 metres high & made of grey stone."
    expect_answer(service, model, "How high is the Velna lighthouse?", "Title: The Velna lighthouse (http://facts.test/1)", fact)
    ensure(is_grounded(service), "a completion with a fact is not grounded")
    expect_answer(service, model, "What's the \"ferry\" to Orsk (called)? 'x' * -- ; AND", "Mirabel. It's painted green.")
    # With these characters, the first would send the query to an outside engine, and the others would be commands.
    expect_answer(service, model, "!!g Mirabel", "Mirabel")
    expect_answer(service, model, ":de !f <9 Ombra", "212")
    expect_answer(service, model, "Xyzzy?", "found nothing")
    ensure(not is_grounded(service), "a completion without results is grounded")

    away = searx.database.with_suffix(".away")
    searx.database.rename(away)
    expect_unavailable(service, model, "the engine is broken")
    away.rename(searx.database)
    expect_answer(service, model, "How deep is Lake Ombra?", "212")

    searx.stop()
    expect_unavailable(service, model, "searx is stopped")
    tried = service.run("check")
    ensure(tried.returncode == 1 and "FAIL  search" in tried.stdout, f"check says: {tried.stdout}")
    searx.start()
    expect_answer(service, model, "How deep is Lake Ombra?", "212")


if __name__ == "__main__":
    main()
