"""Has conversations with chat interfaces in Chromium: Gradio's load_chat, or with --open-webui Open WebUI.

    .venv-clients/bin/python tests/browser/interfaces.py [--open-webui] [--shot FILE]

The interface runs with the Python that runs this file; --shot keeps a picture of the conversation.
"""

import argparse
import concurrent.futures
import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "outside"))
from service import REPLY_SECONDS, Runtime, Service, ensure, free_port, until  # noqa: E402

HERE = pathlib.Path(__file__).resolve().parent
# Open WebUI prepares its database at the first start.
START_SECONDS = 180
BROWSER_SECONDS = 300
RUNNING = 16
TITLE = "The Adriatic Sea"
CONVERSATION = {
    "What is the Adriatic?": "The Adriatic is the arm of the Mediterranean between Italy and the Balkans.",
    "Who sails it?": "Fishermen, ferries, and many people on holiday sail it.",
    "Where to?": "Most sail from Rijeka, Split or Ancona to the islands of Dalmatia.",
}

GRADIO = """
import os, gradio
chat = gradio.load_chat(os.environ["BASE"], model="adriaticum", token=os.environ["KEY"])
chat.launch(server_name="127.0.0.1", server_port=int(os.environ["PORT"]))
"""


class ConversingRuntime(Runtime):
    """Answers the conversation's questions and the request for a title. "Hold." waits."""

    def __init__(self):
        super().__init__()
        self.gate = threading.Event()

    def answer(self, body):
        question = body["messages"][-1]["content"]
        if question == "Hold.":
            self.gate.wait(REPLY_SECONDS)
        if answer := CONVERSATION.get(question):
            return 200, self.completion(answer)
        return 200, self.completion(json.dumps({"title": TITLE}))


@contextlib.contextmanager
def started(command, address, log, **environment):
    """An interface that answers at its address. It gets none of the user's own settings."""
    environment = {"PATH": os.environ["PATH"]} | environment
    with log.open("wb") as output, subprocess.Popen(command, env=environment, stdout=output, stderr=output) as process:
        try:
            ensure(until(lambda: process.poll() is not None or answers(address), START_SECONDS) and process.poll() is None,
                   f"the interface did not start:\n{log.read_text(errors='replace')[-3000:]}")
            yield
        finally:
            process.kill()


def answers(address):
    time.sleep(0.1)
    with contextlib.suppress(OSError), urllib.request.urlopen(address, timeout=REPLY_SECONDS) as reply:
        return reply.status == 200
    return False


def converse(name, address, shot, questions=tuple(CONVERSATION)):
    """Asks the questions in a new page. Returns what is shown."""
    asked = {"interface": name, "address": address, "questions": questions, "shot": shot and str(shot)}
    done = subprocess.run(["node", HERE / "chat.mjs", json.dumps(asked)], stdout=subprocess.PIPE, text=True, timeout=BROWSER_SECONDS)
    ensure(done.returncode == 0, "the conversation failed, see above")
    shown = json.loads(done.stdout)
    for question, text in zip(questions, shown["answers"], strict=True):
        ensure(CONVERSATION[question] in text, f"{name} shows {text!r} after {question!r}")
    return shown


def check_gradio(service, folder, shot):
    port = free_port()
    command = [sys.executable, "-I", "-c", GRADIO]
    with started(command, f"http://127.0.0.1:{port}/", folder / "log", HOME=str(folder), PORT=str(port), KEY=service.key,
                 BASE=f"http://127.0.0.1:{service.port}/v1", GRADIO_ANALYTICS_ENABLED="False", HF_HUB_OFFLINE="1"):
        converse("gradio", f"http://127.0.0.1:{port}/", shot)
    return "Gradio's load_chat: three turns"


def check_open_webui(service, folder, shot, runtime):
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    command = [pathlib.Path(sys.executable).with_name("open-webui"), "serve", "--host", "127.0.0.1", "--port", str(port)]
    settings = {
        "OPENAI_API_BASE_URL": f"http://127.0.0.1:{service.port}/v1", "OPENAI_API_KEY": service.key,
        "DEFAULT_MODEL_METADATA": '{"capabilities":{"builtin_tools":false}}',
        "WEBUI_AUTH": "False", "WEBUI_SECRET_KEY": "x", "ENABLE_OLLAMA_API": "False",
        "ENABLE_TAGS_GENERATION": "False", "ENABLE_FOLLOW_UP_GENERATION": "False",
        "OFFLINE_MODE": "True", "HF_HUB_OFFLINE": "1", "RAG_EMBEDDING_ENGINE": "openai",
        "BYPASS_EMBEDDING_AND_RETRIEVAL": "True", "DATA_DIR": str(folder), "HOME": str(folder),
    }
    with started(command, f"{address}/health", folder / "log", **settings):
        shown = converse("openWebUI", address, shot)
        ensure(TITLE in shown["title"], f"the title is {shown['title']!r}")
        with concurrent.futures.ThreadPoolExecutor(RUNNING) as pool:
            before = len(runtime.calls)
            running = [pool.submit(hold, service) for _ in range(RUNNING)]
            ensure(until(lambda: len(runtime.calls) == before + RUNNING), "the requests do not run")
            # A new page asks for the models, and shows the one that it found.
            converse("openWebUI", address, None, questions=())
            runtime.gate.set()
            ensure(all(one.result() == 200 for one in running), "a request that ran beside the list failed")
    return f"Open WebUI: three turns, a title, and the model beside {RUNNING} running requests"


def hold(service):
    with contextlib.closing(service.connection()) as connection:
        body = {"model": "adriaticum", "messages": [{"role": "user", "content": "Hold."}]}
        headers = {"Authorization": service.authorization, "Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        return connection.getresponse().status


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--open-webui", action="store_true")
    parser.add_argument("--shot", type=pathlib.Path)
    options = parser.parse_args()
    shot = options.shot and options.shot.resolve()
    with tempfile.TemporaryDirectory(prefix="adriaticum-interface-") as name, ConversingRuntime() as runtime:
        folder = pathlib.Path(name)
        (folder / "interface").mkdir()
        with Service(folder, runtime, compatibility="openai", workers=RUNNING) as service:
            if options.open_webui:
                print(check_open_webui(service, folder / "interface", shot, runtime))
            else:
                print(check_gradio(service, folder / "interface", shot))
            service.ensure_it_ends_well()


if __name__ == "__main__":
    main()
