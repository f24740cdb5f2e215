"""Tests grounding with the real model of `make run` and the embedded index.

    python3 tests/outside/grounded_model.py

Asks ten questions about invented facts, which no model can know, at temperature 0. With grounding the answers contain
the facts, without it they do not.
"""

import os
import pathlib
import tempfile
import types

from real_model import ask, chat, ensure_completion, make_run, runtime
from service import ROOT, Service, ensure, free_port

# The files of the index: name and text.
DOCUMENTS = {
    "islands/lighthouse.md": "# The Velna lighthouse\n\nThe Velna lighthouse stands on the island of Orsk. It is 47 metres"
    " high and was built of grey stone. Its keeper lives in a small house beside it.\n",
    "islands/ferry.txt": "The ferry to Orsk is called the Mirabel. It leaves the harbour of Dunmar every morning and"
    " carries forty passengers.\n",
    "towns/dunmar.html": "<html><head><title>Founding of Dunmar</title><style>p { color: red }</style></head><body>"
    "<h1>Founding of Dunmar</h1><p>The town of <b>Dunmar</b> was founded in 1683 by Captain Ilse Harrow. She came with"
    " three ships and built a harbour.</p></body></html>",
    "towns/bridge.md": "# The Tarvik bridge\n\nThe Tarvik bridge crosses the river Sela. It was opened in 1921 and is"
    " painted green.\n",
    "office.md": "# The office of Brandel and Sons\n\n## Coffee\n\nThe coffee machine in the office of Brandel and Sons is"
    " cleaned on Thursdays. Milk is in the fridge.\n\n## Guest network\n\nThe password of the guest network at Brandel and"
    " Sons is bluebadger. It is changed every year.\n",
    "nature/ombra.md": "# Lake Ombra\n\nLake Ombra is 212 metres deep. It is the deepest lake of the Karst of Velin, and its"
    " water is very cold.\n",
    "nature/quillfish.txt": "The quillfish eats mostly red algae. It lives in the bay of Sorn and is as long as a hand.\n",
    "nature/kessar.md": "# Mount Kessar\n\nMount Kessar was first climbed by Oda Lindqvist, together with her brother. They"
    " needed four days.\n",
    "towns/clock.html": "<title>The Pelmo clock</title><p>The Pelmo clock in the tower of Sorn strikes thirteen times at"
    " noon, because its maker made a mistake.",
}

# A question, and texts of which a good answer contains one.
QUESTIONS = {
    "How high is the Velna lighthouse?": ["47"],
    "What is the name of the ferry to Orsk?": ["Mirabel"],
    "Who founded the town of Dunmar?": ["Harrow"],
    "When was the Tarvik bridge opened?": ["1921"],
    "On which day is the coffee machine of Brandel and Sons cleaned?": ["Thursday"],
    "What is the password of the guest network at Brandel and Sons?": ["bluebadger"],
    "How deep is Lake Ombra?": ["212"],
    "What does the quillfish eat?": ["algae"],
    "Who first climbed Mount Kessar?": ["Lindqvist"],
    "How many times does the Pelmo clock strike at noon?": ["thirteen", "13"],
}

LEAST_WITH = 8
MOST_WITHOUT = 1


def count_facts(service):
    """Returns how many answers contain their fact, and a line for each question."""
    count, lines = 0, []
    for question, facts in QUESTIONS.items():
        answer = ensure_completion(*ask(service, chat(question, temperature=0, max_tokens=64)), 64)
        text = " ".join(answer["choices"][0]["message"]["content"].split())
        is_found = any(fact in text for fact in facts)
        count += is_found
        lines.append(f"  {'found  ' if is_found else 'missing'}  {question} {text[:100]}")
    return count, "\n".join(lines)


def main():
    make_run.VAR.mkdir(exist_ok=True)
    make_run.RUNTIME.mkdir(exist_ok=True)
    make_run.prepare_runtime()
    with tempfile.TemporaryDirectory(prefix="adriaticum-grounded-") as name:
        folder, port = pathlib.Path(name), free_port()
        documents = folder / "documents"
        for path, text in DOCUMENTS.items():
            (documents / path).parent.mkdir(parents=True, exist_ok=True)
            (documents / path).write_text(text)
        address = types.SimpleNamespace(url=f"http://127.0.0.1:{port}/v1")
        with runtime(port, folder / "runtime.log"):
            with Service(folder, address) as service:
                without, lines = count_facts(service)
                print(f"without grounding, {without} of {len(QUESTIONS)} facts\n{lines}")
                service.ensure_it_ends_well()
            with Service(folder, address, search_url="index:", search_grounding="always") as service:
                added = service.run("search", "add", str(documents))
                ensure(f"{len(DOCUMENTS)} added" in added.stderr, f"the documents were not added: {added.stderr}")
                grounded, lines = count_facts(service)
                print(f"with grounding, {grounded} of {len(QUESTIONS)} facts\n{lines}")
                service.ensure_it_ends_well()
    ensure(grounded >= LEAST_WITH, f"with grounding, the model gives {grounded} facts; at least {LEAST_WITH} are expected")
    ensure(without <= MOST_WITHOUT, f"without grounding, the model gives {without} facts, which it cannot know")


if __name__ == "__main__":
    os.chdir(ROOT)
    main()
