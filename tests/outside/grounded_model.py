"""Tests grounding with the real model of `make run` and a folder of documents.

    python3 tests/outside/grounded_model.py

Asks ten questions about invented facts, which no model can know, at temperature 0. With grounding the answers contain
the facts, without it they do not. Of twenty more questions, which the documents do not answer, most get completions that are
not grounded. tests/integration/search.rs asks the same questions without a model.
"""

import json
import os
import pathlib
import tempfile
import types

from real_model import ask, chat, ensure_completion, prepare, runtime
from service import ROOT, Service, ensure, free_port, until

DOCUMENTS = ROOT / "tests/grounding/documents"
ASKED = json.loads((ROOT / "tests/grounding/questions.json").read_text())
# A question, and texts of which a good answer contains one.
QUESTIONS = {asked["question"]: asked["facts"] for asked in ASKED if asked.get("model")}
UNANSWERED = [asked["question"] for asked in ASKED if not asked["facts"]]

LEAST_WITH = 8
MOST_WITHOUT = 1
MOST_GROUNDED = 4


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


def grounded_without_facts(service):
    """Returns the questions whose completions count as grounded although no document answers them."""
    grounded = []
    for question in UNANSWERED:
        answer = ensure_completion(*ask(service, chat(question, temperature=0, max_tokens=16)), 16)
        row = json.loads(service.run("usage", "show", answer["id"], "--json").stdout)
        if row["grounded"]:
            grounded.append(question)
    return grounded


def main():
    prepare()
    with tempfile.TemporaryDirectory(prefix="adriaticum-grounded-") as name:
        folder, port = pathlib.Path(name), free_port()
        address = types.SimpleNamespace(url=f"http://127.0.0.1:{port}/v1")
        with runtime(port, folder / "runtime.log"):
            with Service(folder, address) as service:
                without, lines = count_facts(service)
                print(f"without grounding, {without} of {len(QUESTIONS)} facts\n{lines}")
                service.ensure_it_ends_well()
            with Service(folder, address, search_url=f"folder:{DOCUMENTS}", search_grounding="always") as service:
                ensure(until(lambda: "are indexed" in service.logged()), f"there is no index:\n{service.last_logged()}")
                grounded, lines = count_facts(service)
                print(f"with grounding, {grounded} of {len(QUESTIONS)} facts\n{lines}")
                wrong = grounded_without_facts(service)
                print(f"of {len(UNANSWERED)} questions that no document answers, {len(wrong)} grounded")
                service.ensure_it_ends_well()
    ensure(grounded >= LEAST_WITH, f"with grounding, the model gives {grounded} facts; at least {LEAST_WITH} are expected")
    ensure(len(wrong) <= MOST_GROUNDED, f"grounded, though no document answers them: {wrong}")
    ensure(without <= MOST_WITHOUT, f"without grounding, the model gives {without} facts, which it cannot know")


if __name__ == "__main__":
    os.chdir(ROOT)
    main()
