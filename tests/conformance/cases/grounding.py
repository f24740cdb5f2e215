"""Search: which requests need it, what the model gets, and what happens without it."""

import pathlib
import signal
import tempfile
import threading
import urllib.parse

from harness import Runtime, Server, chat, is_completion, is_error, until
from shared import RUNTIME, UNREACHABLE

QUESTION = "How high is the Velna lighthouse?"
FACT = "The Velna lighthouse is 47 metres high."


class _SearXng(Runtime):
    """A scripted SearXNG instance: it records its queries, and finds `facts`."""

    class Handler(Runtime.Handler):
        def do_GET(self):
            query = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)
            self.server.queries.append(query["q"][0])
            self.server.gate.wait(60)
            results = [{"title": "Facts", "url": "http://facts.test/", "content": fact} for fact in self.server.facts]
            self.send(200, {"query": query["q"][0], "results": results, "unresponsive_engines": []})

    def __init__(self, *facts):
        super().__init__()
        self.url = self.url.removesuffix("/v1")
        self.facts, self.queries, self.gate = facts, [], threading.Event()
        self.gate.set()


def _row(server):
    return server.rows("SELECT status, error_code, grounded FROM usage ORDER BY request_id DESC LIMIT 1")[0]


def _prompt():
    return [message["content"] for message in RUNTIME.calls[-1].body["messages"]]


def what_search_finds_reaches_the_model():
    RUNTIME.answer = RUNTIME.good
    search = _SearXng(*[f"{FACT} ({number})" for number in range(5)])
    with Server(RUNTIME, search_url=search.url, search_grounding="always", search_results=2) as server:
        is_completion(server.post(chat(QUESTION), server.create_key()))
        prompt = _prompt()
        assert prompt[-1] == QUESTION and "47 metres" in prompt[0], prompt
        assert prompt[0].count("47 metres") == 2, "search.results is the most that the model gets"
        assert len(search.queries) == 1 and "Velna" in search.queries[0], search.queries
        assert _row(server) == (200, None, 1), _row(server)


def an_answer_without_results_is_not_grounded():
    RUNTIME.answer = RUNTIME.good
    with Server(RUNTIME, search_url=_SearXng().url, search_grounding="always") as server:
        is_completion(server.post(chat(QUESTION), server.create_key()))
        assert _row(server) == (200, None, 0), _row(server)


def a_result_that_cannot_be_read_is_skipped():
    RUNTIME.answer = RUNTIME.good
    search = _SearXng("\ud800", {}, FACT)
    with Server(RUNTIME, search_url=search.url, search_grounding="always") as server:
        key = server.create_key()
        is_completion(server.post(chat(QUESTION), key))
        assert "47 metres" in _prompt()[0] and _row(server) == (200, None, 1), (_prompt(), _row(server))
        search.facts = ["\ud800", {}]
        is_error(server.post(chat(QUESTION), key), "search_unavailable")


def an_unavailable_search_is_503_and_wins_over_the_runtime():
    slow = _SearXng(FACT)
    slow.gate.clear()
    for settings in ({"search_url": UNREACHABLE.url}, {"search_url": slow.url, "search_timeout": 1}):
        with Server(runtime_url=f"{UNREACHABLE.url}/v1", search_grounding="always", **settings) as server:
            reply = server.post(chat(QUESTION), server.create_key())
            is_error(reply, "search_unavailable")
            assert reply.headers.get("x-should-retry") == "false", reply.headers
            assert _row(server) == (503, "search_unavailable", 0), _row(server)
    slow.gate.set()


def without_grounding_search_is_not_asked():
    RUNTIME.answer = RUNTIME.good
    with Server(RUNTIME, search_url=UNREACHABLE.url, search_grounding="off") as server:
        is_completion(server.post(chat(), server.create_key()))


def patterns_decide_which_requests_need_search():
    RUNTIME.answer = RUNTIME.good
    search = _SearXng(FACT)
    with Server(RUNTIME, search_url=search.url, search_grounding="match", search_match="lighthouse\nferry") as server:
        key = server.create_key()
        for content, is_searched in ((QUESTION, True), ("The ferry to Orsk?", True), ("Say hello.", False)):
            before = len(search.queries)
            is_completion(server.post(chat(content), key))
            assert len(search.queries) - before == is_searched, content


def a_folder_of_documents():
    RUNTIME.answer = RUNTIME.good
    with tempfile.TemporaryDirectory() as folder:
        document = pathlib.Path(folder) / "lighthouse.md"
        document.write_text(f"# Lighthouses\n\n{FACT}\n")
        with Server(RUNTIME, search_url=f"folder:{folder}", search_grounding="always") as server:
            assert until(lambda: "are indexed" in server.logged()), server.last_logged()
            key = server.create_key()
            assert "47 metres" in server.cli("search", "query", "Velna", "lighthouse").stdout
            is_completion(server.post(chat(QUESTION), key))
            assert "47 metres" in _prompt()[0] and _row(server) == (200, None, 1), (_prompt(), _row(server))
            document.write_text("# Lighthouses\n\nThere are none.\n")
            server.process.send_signal(signal.SIGHUP)
            assert until(lambda: server.logged().count("are indexed") == 2), server.last_logged()
            is_completion(server.post(chat("Who keeps the harbour?"), key))
            assert _row(server) == (200, None, 0), _row(server)
