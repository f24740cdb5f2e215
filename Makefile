# What a person runs is what CI runs. `make` alone lists the targets.

PYTHON ?= python3
CONFORMANCE ?= ../shared/acceptance/conformance.py
FUZZ_SECONDS ?= 120

.DEFAULT_GOAL := help
.PHONY: help build run python test lint unit outside tls clients console model test-crash test-install bench bench-years \
	bench-tools bench-docs bench-scale bench-instructions \
	bench-console sizes install uninstall deb sbom static fuzz clean

# Two builds of the same sources give the same bytes, wherever they are made: the folders' names stay out of them, and
# what is packed bears the time of the last commit, or where there is none, of the release.
CARGO_HOME ?= $(HOME)/.cargo
SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null || date -r Cargo.toml +%s)
export SOURCE_DATE_EPOCH
REMAP := --remap-path-prefix=$(CURDIR)=. --remap-path-prefix=$(CARGO_HOME)=cargo
# The time is not for the compiler: some build scripts would run again after every commit.
BUILD := env -u SOURCE_DATE_EPOCH RUSTFLAGS="$(RUSTFLAGS) $(REMAP)" cargo build --release --locked

PREFIX ?= /usr/local
SYSCONFDIR ?= /etc

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 26

build: ## Build the release binary, target/release/adriaticum
	$(BUILD)

run: python build ## Start the service with a real model behind it; RUNTIME_URL=... uses a runtime of your own
	@$(PYTHON) runtime/run.py

# Before the build, so that nobody waits for it in vain.
python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
		echo "Python 3.10 or newer is needed, and $(PYTHON) is not. Install the package python3, or name another:" \
			"PYTHON=/path/to/python3 make run" >&2; exit 1; }

test: lint unit outside tls clients console model ## Run every check

lint: ## Check the format, the lints and the documentation
	cargo fmt --check
	cargo clippy --all-targets --locked -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --no-deps --document-private-items --locked

unit: ## Run the unit and integration tests
	cargo test --locked

outside: build .venv/ready ## Hold the release binary to the contract, the OpenAPI document, Search, Prometheus, slow clients, crashes
	@test -x $(CONFORMANCE) || { echo "$(CONFORMANCE) is not there. CONFORMANCE=... names another place."; exit 1; }
	$(CONFORMANCE)
	.venv/bin/python tests/outside/openapi.py
	@tests/outside/need 'command -v slowhttptest' slowhttptest
	$(PYTHON) tests/outside/slow_clients.py
	@tests/outside/need 'command -v searx-run' searx
	$(PYTHON) tests/outside/search.py
	@tests/outside/need 'command -v prometheus && command -v promtool' prometheus
	$(PYTHON) tests/outside/metrics.py
	$(PYTHON) tests/outside/full_disk.py
	$(PYTHON) tests/outside/crash.py
	$(PYTHON) tests/outside/power_cut.py
	@tests/outside/need 'command -v valgrind' valgrind
	$(PYTHON) bench/instructions.py --check

tls: build ## Hold the release binary to the contract over TLS, to sslscan, and to slow handshakes
	@test -x $(CONFORMANCE) || { echo "$(CONFORMANCE) is not there. CONFORMANCE=... names another place."; exit 1; }
	@tests/outside/need 'command -v openssl' openssl
	@tests/outside/need 'command -v sslscan' sslscan
	$(PYTHON) tests/outside/tls.py $(CONFORMANCE)

clients: build .venv-clients/ready ## Run six client libraries against the release binary
	@tests/outside/need 'command -v npm' npm
	npm ci --prefix tests/clients --silent --no-audit --no-fund
	.venv-clients/bin/python tests/clients/run.py

console: build ## Drive the console in a real browser, and look for what shuts people out of it
	@tests/outside/need 'command -v npm' npm
	@tests/outside/need 'command -v chromium' chromium
	npm ci --prefix tests/browser --silent --no-audit --no-fund
	$(PYTHON) tests/browser/run.py

model: build ## Run the release binary in front of the real model, as make run does
	@tests/outside/need '$(PYTHON) -c "import ensurepip"' python3-venv
	@tests/outside/need 'command -v curl' curl
	$(PYTHON) tests/outside/real_model.py
	$(PYTHON) tests/outside/grounded_model.py

test-crash: build ## Kill the service 100 times and cut its power 50 times, and look for what is lost
	$(PYTHON) tests/outside/crash.py --kills 100
	$(PYTHON) tests/outside/power_cut.py --cuts 50

bench: build bench-tools ## Measure it beside nginx and HAProxy, and with PEERS=1 beside other gateways
	$(PYTHON) bench/compare.py

bench-docs: ## Put the last results of make bench and make bench-scale into README.md and docs/performance.md
	$(PYTHON) bench/publish.py

bench-scale: build bench-tools ## Measure how the cost grows: connections, bodies, keys, workers, and ROWS in the ledger
	@tests/outside/need 'command -v openssl' openssl
	$(PYTHON) bench/footprint.py
	$(PYTHON) bench/scale.py $(ROWS)

bench-years: build bench-tools ## Print what a ledger of ten million rows costs
	$(PYTHON) bench/years.py

bench-tools:
	$(BUILD) --examples
	@tests/outside/need 'command -v wrk' wrk
	@tests/outside/need 'command -v nginx' nginx-light
	@tests/outside/need 'command -v haproxy' haproxy

bench-instructions: build ## Count the instructions of a completion, by module, and keep the sum for make test
	@tests/outside/need 'command -v valgrind' valgrind
	cargo build --profile symbols --locked --bin adriaticum
	$(PYTHON) bench/instructions.py

bench-console: build ## Print what the console costs the API, and its pages' times with ten million rows
	@tests/outside/need 'command -v wrk' wrk
	@tests/outside/need 'command -v nginx' nginx-light
	$(PYTHON) bench/console.py

install: build ## Install below PREFIX (/usr/local) and SYSCONFDIR (/etc), or into DESTDIR for a package
	install -D -m 755 target/release/adriaticum $(DESTDIR)$(PREFIX)/bin/adriaticum
	@# What an operator has changed stays.
	test -e $(DESTDIR)$(SYSCONFDIR)/adriaticum/adriaticum.toml || \
		install -D -m 644 packaging/adriaticum.toml $(DESTDIR)$(SYSCONFDIR)/adriaticum/adriaticum.toml
	install -d $(DESTDIR)$(PREFIX)/lib/systemd/system
	sed 's:/usr/bin/adriaticum:$(PREFIX)/bin/adriaticum:' systemd/adriaticum.service \
		> $(DESTDIR)$(PREFIX)/lib/systemd/system/adriaticum.service
	install -m 644 systemd/adriaticum.socket systemd/adriaticum-runtime.service $(DESTDIR)$(PREFIX)/lib/systemd/system
	install -D -m 644 systemd/adriaticum.sysusers $(DESTDIR)$(PREFIX)/lib/sysusers.d/adriaticum.conf
	install -D -m 644 systemd/adriaticum.tmpfiles $(DESTDIR)$(PREFIX)/lib/tmpfiles.d/adriaticum.conf
	install -D -m 644 packaging/adriaticum.1 $(DESTDIR)$(PREFIX)/share/man/man1/adriaticum.1
	install -D -m 644 packaging/adriaticum.toml.5 $(DESTDIR)$(PREFIX)/share/man/man5/adriaticum.toml.5
	install -D -m 644 packaging/adriaticum.bash $(DESTDIR)$(PREFIX)/share/bash-completion/completions/adriaticum
	install -D -m 644 packaging/adriaticum.zsh $(DESTDIR)$(PREFIX)/share/zsh/site-functions/_adriaticum
	install -D -m 644 packaging/adriaticum.fish $(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d/adriaticum.fish
	@test -n "$(DESTDIR)" || printf '%s\n' 'Installed. To start it:' \
		'  systemd-sysusers && systemd-tmpfiles --create adriaticum.conf && systemctl daemon-reload' \
		'  systemctl enable --now adriaticum.socket adriaticum.service'

uninstall: ## Remove what install has put there; the configuration and the data stay
	@test -n "$(DESTDIR)" || ! test -d /run/systemd/system || systemctl disable --now adriaticum.socket \
		adriaticum.service adriaticum-runtime.service
	cd $(DESTDIR)$(PREFIX) && rm -f bin/adriaticum lib/systemd/system/adriaticum.service \
		lib/systemd/system/adriaticum.socket lib/systemd/system/adriaticum-runtime.service \
		lib/sysusers.d/adriaticum.conf lib/tmpfiles.d/adriaticum.conf share/man/man1/adriaticum.1 \
		share/man/man5/adriaticum.toml.5 share/bash-completion/completions/adriaticum \
		share/zsh/site-functions/_adriaticum share/fish/vendor_completions.d/adriaticum.fish

deb: build sbom ## Build the Debian package, target/debian/adriaticum_*.deb
	@cargo deb --version >/dev/null 2>&1 || cargo install cargo-deb --locked
	@tests/outside/need 'command -v dpkg-shlibdeps' dpkg-dev
	cargo deb --locked --no-build --no-strip $(if $(DEB_VERSION),--deb-version $(DEB_VERSION))

sbom: ## Write what it is made of: target/adriaticum.cdx.json (CycloneDX), and the licenses of the libraries
	$(PYTHON) packaging/parts.py target/adriaticum.cdx.json target/THIRD-PARTY.gz

static: ## Build a static binary for any Linux of this architecture
	packaging/static.sh $(REMAP)

sizes: deb static ## Print the sizes, the exposure of the unit, and whether two builds give the same bytes
	$(PYTHON) packaging/sizes.py

test-install: ## Boot a Debian, and there install, use, break, upgrade and purge the package; three proxies (as root)
	@test "$$(id -u)" = 0 || { echo "It boots a container, which only root may do: sudo make test-install" >&2; exit 1; }
	@tests/outside/need 'command -v debootstrap' debootstrap
	@tests/outside/need 'command -v systemd-nspawn' systemd-container
	@tests/outside/need 'command -v lintian' lintian
	@tests/outside/need 'command -v zsh' zsh
	@tests/outside/need 'command -v fish' fish
	@tests/outside/need 'command -v nginx' nginx-light
	@tests/outside/need 'command -v caddy' caddy
	@tests/outside/need 'command -v haproxy' haproxy
	$(MAKE) --no-print-directory deb
	$(PYTHON) tests/outside/install.py
	$(PYTHON) tests/outside/proxies.py

fuzz: ## Fuzz the request reader, the validator and the reader of documents, FUZZ_SECONDS each
	@cargo fuzz --version >/dev/null 2>&1 || cargo install cargo-fuzz --locked
	@for target in reader validator documents; do \
		mkdir -p fuzz/corpus/$$target; \
		RUSTC_BOOTSTRAP=1 ASAN_OPTIONS=detect_odr_violation=0 cargo fuzz run $$target fuzz/corpus/$$target fuzz/seeds/$$target -- \
			-max_total_time=$(FUZZ_SECONDS) || exit 1; \
	done

clean: ## Remove what was built; var/, with the keys and the ledger of make run, stays
	rm -rf target fuzz/target .venv .venv-clients tests/clients/node_modules tests/browser/node_modules

.venv/ready: tests/outside/requirements.txt
.venv-clients/ready: tests/clients/requirements.txt
.venv/ready .venv-clients/ready:
	@tests/outside/need '$(PYTHON) -c "import ensurepip"' python3-venv
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check -r $<
	@touch $@
