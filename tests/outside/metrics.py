"""Tests the metrics with a real Prometheus, which scrapes the service, and with promtool.

    python3 tests/outside/metrics.py

It needs Debian's package prometheus. It uses the configurations in docs/monitoring.md, and runs the queries of the
dashboard and of the alert rules. tests/integration/metrics.rs tests the figures themselves.
"""

import contextlib
import json
import pathlib
import re
import subprocess
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request

from service import ROOT, HalfMeasuredRuntime, Service, ensure, free_port

GUIDE = ROOT / "docs" / "monitoring.md"
ALERTS = ROOT / "docs" / "monitoring" / "alerts.yml"
ALERTS_TEST = ROOT / "tests" / "outside" / "alerts_test.yml"
DASHBOARD = ROOT / "docs" / "monitoring" / "dashboard.json"

COMPLETIONS = 6
PATIENCE = 60

# Values in place of Grafana's variables.
VARIABLES = {"$instance": ".*", "$__rate_interval": "1m", "$__range": "1m"}

NAME = re.compile(r"\b(?:adriaticum|process)_[a-z_]+\b")


class Prometheus:
    """A real Prometheus with its own folder and port."""

    def __init__(self, folder, configuration):
        self.url = f"http://127.0.0.1:{free_port()}"
        self.log = folder / "prometheus.log"
        (folder / "prometheus.yml").write_text(configuration)
        promtool("check", "config", folder / "prometheus.yml")
        with self.log.open("wb") as log:
            self.process = subprocess.Popen([
                "prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'tsdb'}",
                f"--web.listen-address={self.url.removeprefix('http://')}",
            ], stdout=log, stderr=log)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()

    def ask(self, path, **parameters):
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}") as response:
            return json.load(response)["data"]

    def query(self, expression):
        try:
            return self.ask("query", query=expression)["result"]
        except urllib.error.HTTPError as error:
            if error.code == 503:  # it listens, but is still starting
                return []
            raise SystemExit(f"Prometheus refuses a query: {expression}\n{error.read().decode()}")

    def wait_for(self, expression):
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            ensure(self.process.poll() is None, f"Prometheus ended:\n{self.log.read_text()[-2000:]}")
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                if self.query(expression):
                    return
            time.sleep(0.1)
        targets = self.ask("targets")["activeTargets"]
        raise SystemExit(f"timeout while waiting for: {expression}\n{[target['lastError'] for target in targets]}")


def promtool(*arguments, **options):
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, **options)
    # Style warnings of promtool have their own exit code.
    ensure(done.returncode == 0, f"promtool {' '.join(map(str, arguments))}:\n{done.stdout}{done.stderr}")


def scrape(service, key):
    response = service.fetch("/metrics", Authorization=f"Bearer {key}")
    ensure(response.status == 200, f"no metrics: {response.status} {response.text}")
    promtool("check", "metrics", input=response.text)
    return response.text


def families(text):
    return {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ")}


def samples(text):
    return {re.match(r"\w+", line)[0] for line in text.splitlines() if not line.startswith("#")}


def ensure_the_guide_names_them_all(text):
    documented = set(re.findall(r"`((?:adriaticum|process)_\w+)`", GUIDE.read_text()))
    there = families(text)
    ensure(documented == there, f"only in the guide: {documented - there}; only in the metrics: {there - documented}")


def dashboard_queries():
    """Returns the queries of the dashboard, each with the labels in its legend."""
    dashboard = json.loads(DASHBOARD.read_text())
    panels = dashboard["panels"]
    ensure(dashboard["uid"] and len({panel["id"] for panel in panels}) == len(panels), "ids are missing or duplicate")
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    ensure(variables == {"datasource", "instance"}, f"the variables are {variables}")
    queries = []
    for panel in panels:
        for target in panel["targets"]:
            for holder in (panel, target):
                ensure(holder["datasource"]["uid"] == "${datasource}", f"{panel['title']}: a fixed data source")
            queries.append((target["expr"], re.findall(r"{{(\w+)}}", target["legendFormat"])))
    return queries


def blocks(language):
    """Returns the code blocks of a language in docs/monitoring.md."""
    return re.findall(rf"^```{language}\n(.*?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE)


def configurations(service, key_file):
    """Yields the configurations in docs/monitoring.md, for this service and with short intervals."""
    for block in blocks("yaml"):
        for old, new in (("/etc/prometheus/adriaticum.key", key_file), ("/etc/prometheus/adriaticum-alerts.yml", ALERTS),
                         (":8080", f":{service.port}")):
            block = block.replace(old, str(new))
        if "rule_files" not in block:
            block += f"rule_files:\n  - {ALERTS}\n"
        yield "global:\n  scrape_interval: 1s\n  evaluation_interval: 1s\n" + block


def ensure_prometheus_makes_use_of_them(folder, service, key, exposed):
    key_file = folder / "adriaticum.key"
    key_file.write_text(key)
    by_name, by_proxy = configurations(service, key_file)
    # Only checked, not run: this host may not resolve the console's name.
    (folder / "by_name.yml").write_text(by_name)
    promtool("check", "config", folder / "by_name.yml")
    queries = dashboard_queries()
    for query in [ALERTS.read_text(), *(expression for expression, _ in queries)]:
        unknown = set(NAME.findall(query)) - exposed
        ensure(not unknown, f"there is no such metric: {unknown} in {query}")
    with Prometheus(folder, by_proxy) as prometheus:
        # A rate needs two scrapes, and the rules are evaluated in between.
        prometheus.wait_for("up == 1")
        ensure(service.complete()[0] == 200, "the service does not answer")
        prometheus.wait_for("count_over_time(adriaticum_build_info[1m]) >= 3")
        for expression, labels in queries:
            for variable, value in VARIABLES.items():
                expression = expression.replace(variable, value)
            found = prometheus.query(expression)
            ensure(found, f"a query of the dashboard has no result: {expression}")
            ensure(all(label in series["metric"] for label in labels for series in found), f"labels of {expression}")
        rules = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
        bad = [rule["name"] for rule in rules if rule["health"] != "ok" or rule["state"] == "firing"]
        ensure(rules and not bad, f"these alert rules fail or fire: {bad}")
    return len(queries), len(rules)


def main():
    promtool("check", "rules", ALERTS)
    promtool("test", "rules", ALERTS_TEST)
    with tempfile.TemporaryDirectory(prefix="adriaticum-metrics-") as name, HalfMeasuredRuntime() as runtime:
        folder = pathlib.Path(name)
        with Service(folder, runtime) as service:
            service.wait_until_it_answers()
            key = service.create_key("prometheus", "--permission", "metrics")
            key_id = json.loads(service.run("keys", "list", "--json").stdout)[0]["id"]
            ensure(service.run("keys", "set", key_id, "--budget", "1000000/month").returncode == 0, "it has no budget")
            for _ in range(COMPLETIONS):
                service.ensure_it_still_answers()
            text = scrape(service, key)
            ensure_the_guide_names_them_all(text)
            # Its sample needs TLS.
            exposed = samples(text) | {"adriaticum_tls_certificate_expiry_timestamp_seconds"}
            queries, rules = ensure_prometheus_makes_use_of_them(folder, service, key, exposed)
            service.ensure_it_ends_well()
    print(f"{len(families(text))} metrics, {queries} queries, {rules} alert rules, all accepted by promtool and Prometheus")


if __name__ == "__main__":
    main()
