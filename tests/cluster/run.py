#!/usr/bin/env python3
"""Gateways on a real PostgreSQL cluster under load, while its parts and theirs are killed, stopped and replaced.

    python3 tests/cluster/run.py [ATTACK...]

Needs root. Runs the attacks whose name contains one of the words, by default all. After each attack every completion that
a client has read must be in the ledger once, with its figures; every chain must verify; no revoked key may be accepted. The
time without completions is printed beside that of psql, which writes to the same cluster; and, if rows could not be written
for a while, how many inferences that cost. ADRIATICUM names another binary than target/release/adriaticum.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import itertools
import json
import pathlib
import signal
import sys
import tempfile
import time
import typing

FOLDER = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent / "outside")]
import ledger  # noqa: E402
from balancer import Balancer  # noqa: E402
from cluster import CHANGE_SECONDS, Cluster, locked, psql  # noqa: E402
from load import CLIENTS, SLOW_SECONDS, Clients, Noise, NumberedRuntime, Probes, Revoker, Writer, ask, longest_gap  # noqa: E402
from proxies import CONSOLE, HOST  # noqa: E402
from service import Service, ensure, until  # noqa: E402

GATEWAYS = ("a", "b")
# What a gateway may add to the time that psql is without service. The shares are for the steps in which both try.
ADDED_SECONDS = 2
ADDED_SHARE = 0.1
# Requests get 503 within 5 s if no inference was spent, and /readyz says so within one; the rest is for a slow machine.
REFUSAL_SECONDS = 5 + 3
READINESS_SECONDS = 1 + 2
# A shorter time without service may go unnoticed between two probes.
NOTICED_SECONDS = 5
# HAProxy trusts a gateway again after two checks, a second apart, and /readyz is a second old.
CHECKS_SECONDS = 3
# The time that a row may wait, and the time after which no inference is begun while one waits.
ROW_SECONDS = 20
UNAVAILABLE_SECONDS = 5
# Outages that are shorter and longer than a row waits. After the first, the standbys need another 5 s to be back.
OUTAGES_SECONDS = (7, ROW_SECONDS + 5)
# After a row has failed, a test write has to succeed first: a second after the last one, and its thread looks once a second.
TEST_WRITE_SECONDS = 2
# The slow calls of a gateway, and the pause between their beginnings: they end during the switchover and after it.
SLOW_CALLS = 6
SLOW_PAUSE_SECONDS = 0.8
# A start watches the heartbeat of a gateway that was killed for 5 s.
RESTART_SECONDS = 6
WORKERS = 8
OBSERVED_SECONDS = 7


class Gateway(Service):
    """One of the gateways, which share a database."""

    def __init__(self, folder, name, runtime, database):
        folder.mkdir()
        super().__init__(folder, runtime, database=database, gateway=name, api_hosts=HOST, console_host=CONSOLE,
                         trusted_proxies="127.0.0.1", workers=WORKERS)
        self.name = name


class Outage(typing.NamedTuple):
    """A time in which no row could be written. `stops_psql`: nor could psql's, which may have to wait for longer."""

    began: float
    ended: float
    stops_psql: bool


class Trial:
    """The cluster, its gateways, and everything that clients have seen of them. `killed` are gateways that an attack ends."""

    def __init__(self, cluster, gateways, balancer, runtime, database, yardstick):
        self.cluster, self.gateways, self.balancer, self.runtime = cluster, gateways, balancer, runtime
        self.database, self.yardstick = database, yardstick
        self.key = gateways[0].create_key("clients")
        self.answers, self.revoked, self.faults = [], [], []

    def attack(self, attack):
        began, self.killed, self.outages = time.monotonic(), set(), []
        self.cluster.wait_until_whole()
        with contextlib.ExitStack() as stack:
            self.clients = stack.enter_context(Clients([*self.gateways, self.balancer], self.key))
            self.writer = stack.enter_context(Writer(self.yardstick))
            self.revoker = stack.enter_context(Revoker(self.gateways, attack.__name__, attack is stop_patroni_alone))
            self.probes = stack.enter_context(Probes(self.gateways))
            self.noise = stack.enter_context(Noise())
            self.wait_for_service(time.monotonic())
            self.began = time.monotonic()
            attack(self)
            self.cluster.wait_until_whole()
            self.wait_for_service(time.monotonic())
            self.ended = time.monotonic()
        self.answers += self.clients.answers + self.revoker.answers
        self.revoked += self.revoker.revoked
        self.faults += self.clients.faults + self.writer.faults + self.revoker.faults + self.probes.faults
        self.report(attack.__name__.replace("_", " "), time.monotonic() - began)
        for gateway, secret in zip(itertools.cycle(self.gateways), self.revoked):
            answer = ask(gateway, secret)
            self.expect(answer and answer.status == 401, f"a revoked key at gateway {gateway.name}: {answer}")
        self.check()

    def wait_for_service(self, moment, also_psql=True):
        """Waits until psql and every gateway have completed something that they began after a moment."""
        def is_served():
            served = (*self.gateways, self.balancer)
            lists = [self.clients.completed(gateway.name) for gateway in served]
            lists += [self.writer.completed()] if also_psql else []
            return all(any(began > moment for began, _ in times[-CLIENTS:]) for times in lists)

        ensure(until(is_served, CHANGE_SECONDS), "the service did not come back:\n" + "\n".join(
            f"gateway {gateway.name}:\n{gateway.last_logged()}" for gateway in self.gateways))

    def report(self, name, seconds):
        yardstick = longest_gap(self.writer.completed(), self.began - 1, self.ended)
        statuses = collections.Counter(answer.status or "a broken connection" for answer in self.clients.answers)
        counted = ", ".join(f"{count} x {status}" for status, count in statuses.most_common())
        gaps = ", ".join(f"{gateway.name} {self.gap(gateway):.1f} s" for gateway in (*self.gateways, self.balancer))
        print(f"{name}: without service: psql {yardstick:.1f} s, {gaps}; answers: {counted}; "
              f"{len(self.revoker.revoked)} keys revoked; the machine's delay {self.noise.latest:.2f} s; {seconds:.0f} s", flush=True)
        unseen = [outage.ended - outage.began + TEST_WRITE_SECONDS for outage in self.outages if not outage.stops_psql]
        most = yardstick * (1 + ADDED_SHARE) + ADDED_SECONDS + 2 * self.noise.latest + max(unseen, default=0)
        self.expect(self.gap(self.balancer) <= most + CHECKS_SECONDS,
                    f"HAProxy was without service for {self.gap(self.balancer):.1f} s, psql for {yardstick:.1f} s")
        for gateway in self.gateways:
            if gateway.name not in self.killed:
                self.expect(self.gap(gateway) <= most, f"gateway {gateway.name} was without service for "
                            f"{self.gap(gateway):.1f} s, psql for {yardstick:.1f} s")
                self.check_readiness(gateway)
        for outage in self.outages:
            self.check_outage(outage)

    def wait_through_outage(self, seconds, stops_psql):
        began = time.monotonic()
        time.sleep(seconds)
        self.outages.append(Outage(began, time.monotonic(), stops_psql))

    def check_outage(self, outage):
        """Completions in flight wait for their rows, and those that wait for too long are lost. No others are begun."""
        slack = 1 + 2 * self.noise.latest
        began, ended = outage.began, outage.ended
        # Without those that HAProxy gave by itself.
        answers = [answer for answer in self.clients.answers if answer.request_id and answer.began < ended and answer.ended > began]
        waited = [answer for answer in answers if answer.status == 200 and answer.ended - answer.began > UNAVAILABLE_SECONDS]
        unrecorded = [answer for answer in answers if answer.status == 503]
        lost = [answer for answer in unrecorded if not answer.may_retry]
        begun = [moment for moment in self.runtime.times if began + UNAVAILABLE_SECONDS + slack < moment < ended]
        print(f"  no rows for {ended - began:.0f} s: {len(waited)} completions waited, {len(lost)} inferences were lost, "
              f"{len(unrecorded) - len(lost)} requests were refused before the call", flush=True)
        self.expect(not begun, f"{len(begun)} inferences were begun later than {UNAVAILABLE_SECONDS} s after the last row")
        self.expect(len(unrecorded) > len(lost), "no request was refused before the call")
        most = WORKERS * len(self.gateways)
        self.expect(len(lost) <= most, f"{len(lost)} inferences were lost, and {most} could run")
        slowest = max((answer.ended - answer.began for answer in lost), default=0)
        self.expect(slowest <= ROW_SECONDS + REFUSAL_SECONDS + 2 * self.noise.latest, f"a row was given up after {slowest:.1f} s")
        if ended - began > ROW_SECONDS + slack:
            self.expect(lost, "no row was given up")
        if outage.stops_psql:
            ended = min((back for _, back in self.writer.completed() if back > ended), default=self.ended)
        if ended - began < ROW_SECONDS - slack:
            self.expect(waited and not lost, f"{len(waited)} completions waited, and {len(lost)} were lost before {ROW_SECONDS} s")

    def gap(self, gateway):
        return longest_gap(self.clients.completed(gateway.name), self.began - 1, self.ended)

    def check_readiness(self, gateway):
        refused = [answer for answer in self.clients.answers if answer.gateway == gateway.name and answer.status == 503]
        slowest = max((answer.ended - answer.began for answer in refused if answer.may_retry), default=0)
        self.expect(slowest <= REFUSAL_SECONDS + 2 * self.noise.latest, f"a request was refused after {slowest:.1f} s")
        if refused and self.gap(gateway) > NOTICED_SECONDS:
            first = min(answer.ended for answer in refused)
            unready = [moment for moment, is_ready in self.probes.ready[gateway.name] if not is_ready]
            late = min(unready, default=self.ended) - first
            self.expect(late <= READINESS_SECONDS + 2 * self.noise.latest, f"/readyz said so {late:.1f} s after the first 503")

    def expect(self, condition, otherwise):
        if not condition:
            self.faults.append(otherwise)

    def check(self):
        """Ends the program with what is wrong. No request is running."""
        self.faults += ledger.faults(self.database, self.gateways, self.answers, self.runtime.asked)
        for gateway in self.gateways:
            gateway.ensure_it_did_not_panic()
        ensure(not self.faults, "\n".join(self.faults))


def kill_the_primary(trial):
    primary = trial.cluster.with_role("leader")
    primary.kill()
    wait_for_another(trial, "leader", primary)
    primary.start()


def stop_the_primary_and_let_it_go_on(trial):
    primary = trial.cluster.with_role("leader")
    primary.pause()
    wait_for_another(trial, "leader", primary)
    primary.resume()


def stop_patroni_alone(trial):
    """The old primary accepts connections and reads, but no commit on it ends: two servers say that they are the primary. A
    gateway that stood still meanwhile reads from the old one, until the commit of a heartbeat hangs."""
    primary, here, name = trial.cluster.with_role("leader"), trial.gateways[0], "of the old primary"
    secret = here.create_key(name)
    identity, = (key["id"] for key in json.loads(here.run("keys", "list", "--json").stdout) if key["name"] == name)
    with Gateway(here.folder.with_name("idle"), "idle", trial.runtime, trial.database) as idle:
        idle.wait_until_it_answers()
        idle.process.send_signal(signal.SIGSTOP)
        primary.pause("/usr/bin/patroni")
        # psql may choose the old primary every time. It has to be served once Patroni goes on.
        wait_for_another(trial, "leader", primary, also_psql=False)
        # The command may not know whether it was done; then it is asked again.
        ensure(until(lambda: not here.run("keys", "revoke", identity).returncode, CHANGE_SECONDS), "keys revoke failed")
        idle.process.send_signal(signal.SIGCONT)
        ask_with_a_revoked_key_and_a_good_one(trial, idle, secret)
        primary.resume()
        idle.ensure_it_ends_well()


def ask_with_a_revoked_key_and_a_good_one(trial, idle, secret):
    """Both are accepted by the old primary, and the rows are written by the new one."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda key: ask(idle, key), (secret, trial.key)))
    trial.revoked.append(secret)
    trial.answers += answers
    statuses = [answer.status for answer in answers]
    trial.expect(statuses == [401, 200], f"a revoked key and a good one got {statuses} at a gateway that reads the old primary")
    trial.expect(trial.runtime.asked[answers[0].number], "the old primary was not asked for the revoked key: this proves nothing")


def kill_the_synchronous_standby(trial):
    standby = trial.cluster.with_role("sync_standby")
    standby.kill()
    wait_for_another(trial, "sync_standby", standby)
    standby.start()


def wait_for_another(trial, role, server, also_psql=True):
    """Waits until another server has a role, and completions work again."""
    others = [name for name, node in trial.cluster.nodes.items() if node is not server]
    ensure(until(lambda: any(trial.cluster.roles().get(name) == role for name in others), CHANGE_SECONDS),
           f"no other node became {role}: {trial.cluster.roles()}")
    trial.wait_for_service(time.monotonic(), also_psql)


def stop_both_standbys_and_let_them_go_on(trial):
    """The primary takes statements, but no commit ends. Those that were given up become durable later."""
    for seconds in OUTAGES_SECONDS:
        trial.cluster.wait_until_whole()
        trial.wait_for_service(time.monotonic())
        standbys = [trial.cluster.with_role(role) for role in ("sync_standby", "replica")]
        for standby in standbys:
            standby.pause()
        trial.wait_through_outage(seconds, stops_psql=True)
        for standby in standbys:
            standby.resume()


def lock_the_table_of_the_rows(trial):
    with locked(trial.database, "usage"):
        trial.wait_through_outage(OUTAGES_SECONDS[0], stops_psql=False)


def kill_a_member_of_etcd(trial):
    """Patroni looks at etcd every 5 s. It must neither demote the primary then nor when the member is back."""
    roles, member = trial.cluster.roles(), trial.cluster.members[0]
    member.kill()
    time.sleep(OBSERVED_SECONDS)
    member.start()
    time.sleep(OBSERVED_SECONDS)
    trial.expect(trial.cluster.roles() == roles, f"the roles changed from {roles} to {trial.cluster.roles()}")


def switch_over_during_slow_calls(trial):
    """A planned switchover, when the calls to the model have taken their 20 s or are about to."""
    count, before, began = SLOW_CALLS * len(trial.gateways), len(trial.runtime.slow), time.monotonic()
    # A thread for each call: one that waited for a thread would begin during the switchover, and may be refused then.
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        calls = []
        for _ in range(SLOW_CALLS):
            calls += [pool.submit(ask, gateway, trial.key, is_slow=True) for gateway in trial.gateways]
            time.sleep(SLOW_PAUSE_SECONDS)
        ensure(until(lambda: len(trial.runtime.slow) - before == count), "not every slow call reached the model")
        time.sleep(max(0, began + SLOW_SECONDS - 1 - time.monotonic()))
        said = trial.cluster.switch_over()
        trial.expect("Success" in said, f"switchover: {said}")
        answers = [call.result() for call in calls]
    trial.answers += answers
    failed = [answer for answer in answers if not answer or answer.status != 200]
    trial.expect(not failed, f"{len(failed)} of {len(answers)} slow calls failed: {failed[:1]}")


def kill_a_gateway(trial):
    """The other one serves meanwhile, and its chain goes on after its next start."""
    gateway = trial.gateways[-1]
    trial.killed.add(gateway.name)
    gateway.kill()
    began = time.monotonic()
    gateway.start()
    gateway.wait_until_it_answers()
    seconds = time.monotonic() - began
    trial.expect(seconds <= RESTART_SECONDS + 2 * trial.noise.latest, f"it served again after {seconds:.1f} s")


ATTACKS = (kill_the_primary, stop_the_primary_and_let_it_go_on, stop_patroni_alone, kill_the_synchronous_standby,
           stop_both_standbys_and_let_them_go_on, lock_the_table_of_the_rows, kill_a_member_of_etcd,
           switch_over_during_slow_calls, kill_a_gateway)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("attacks", nargs="*", metavar="ATTACK")
    options = parser.parse_args()
    chosen = [attack for attack in ATTACKS if not options.attacks or any(word in attack.__name__ for word in options.attacks)]
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(Cluster())
        database, yardstick = cluster.new_database("gateways"), cluster.new_database("yardstick")
        psql(yardstick, "CREATE TABLE written (number BIGINT PRIMARY KEY)")
        print(f"a cluster of three nodes after {time.monotonic() - began:.0f} s", flush=True)
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="adriaticum-gateways-")))
        runtime = stack.enter_context(NumberedRuntime())
        gateways = [stack.enter_context(Gateway(folder / name, name, runtime, database)) for name in GATEWAYS]
        balancer = stack.enter_context(Balancer(folder, gateways))
        trial = Trial(cluster, gateways, balancer, runtime, database, yardstick)
        try:
            for attack in chosen:
                trial.attack(attack)
            for gateway in gateways:
                gateway.ensure_it_ends_well()
            trial.check()
        except BaseException:
            for gateway in gateways:
                lines = [line for line in gateway.logged().splitlines() if "client=" not in line]
                print("\n".join([f"the log of gateway {gateway.name} without its requests:", *lines[-40:]]), flush=True)
            raise
    print(f"cluster: {sum(answer.status == 200 for answer in trial.answers)} completions acknowledged, none lost or doubled; "
          f"{len(trial.revoked)} keys revoked, all refused; {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
