# CI runs the same targets as a person. `make` alone lists them.

PYTHON ?= python3
FUZZ_SECONDS ?= 120

.DEFAULT_GOAL := help
.PHONY: help build run test test-all lint postgres tls openapi attacks crashes full-disk search prometheus clients console model \
	test-install test-cluster test-crash test-arm64 open-webui soak bench bench-years bench-model bench-memory bench-database bench-tools \
	bench-docs bench-scale bench-console sizes install uninstall deb cross sbom static image fuzz mutants requirements clean \
	downloads test-builds generated FORCE
# On two cores, tests that run beside a build or another test would time out or measure each other. tests/steps.py knows which
# do not.
.NOTPARALLEL:

# Reproducible builds: the binary contains no folder names, and packed files have the time of the last commit or, without
# a repository, of Cargo.toml.
CARGO_HOME ?= $(HOME)/.cargo
SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null || date -r Cargo.toml +%s)
export SOURCE_DATE_EPOCH
REMAP := --remap-path-prefix=$(CURDIR)=. --remap-path-prefix=$(CARGO_HOME)=cargo
# The version of Cargo.toml, and the commit. Only builds get it: the program would warn of an unknown variable.
ADRIATICUM_VERSION ?= $(shell sh packaging/version)
# Without SOURCE_DATE_EPOCH, which would make some build scripts run again after every commit.
FOR_BUILDS := env -u SOURCE_DATE_EPOCH ADRIATICUM_VERSION=$(ADRIATICUM_VERSION)
CARGO := $(FOR_BUILDS) cargo
BUILD := RUSTFLAGS="$(RUSTFLAGS) $(REMAP)" $(CARGO) build --release --locked

# The architecture of deb, static and image, by Debian's name.
HOST_ARCH := $(if $(filter aarch64,$(shell uname -m)),arm64,amd64)
ARCH ?= $(HOST_ARCH)
MACHINE := $(if $(filter arm64,$(ARCH)),aarch64,x86_64)
CROSS := $(FOR_BUILDS) RUSTFLAGS="$(RUSTFLAGS) $(REMAP)" packaging/cross.sh $(ARCH)
STATIC := target/static/$(ARCH)/adriaticum

PREFIX ?= /usr/local
SYSCONFDIR ?= /etc

help: ## List the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 26

build: need-build ## Build the release binary, target/release/adriaticum
	@echo "Building target/release/adriaticum: about four minutes the first time on two cores, less after a change."
	@$(BUILD)

run: need-run build ## Start the gateway with a small real model; RUNTIME_URL=... uses your own runtime
	@$(PYTHON) demo/run.py

# Reports missing programs before anything is built.
need-%: FORCE
	@PYTHON=$(PYTHON) tests/prerequisites $*

test: need-test ## Run the unit and integration tests and the conformance suite, on SQLite (three minutes with the first build)
	$(CARGO) test --locked
	ADRIATICUM=target/debug/adriaticum $(PYTHON) tests/conformance/run.py
	@echo "make test: passed. The tests that need PostgreSQL are not part of it: see make test-all."

test-all: ## Run every check: make test and the steps below; STEPS="lint attacks" runs some of them
	@PYTHON=$(PYTHON) $(PYTHON) tests/steps.py

# The steps of make test-all; tests/steps.py has their order. Each is also a target.

lint: need-lint .venv/ready ## Check format, lints, documentation and spelling
	cargo fmt --check
	$(CARGO) clippy --all-targets --locked -- -D warnings
	$(CARGO) clippy --all-targets --locked --features test-postgres -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --no-deps --document-private-items --locked
	@# The words are a function of SQL, a part of a split "hello", and German.
	.venv/bin/codespell --ignore-words-list=iif,hel,als,firs --skip='tests/grounding,*/requirements.txt,*/package-lock.json,*/node_modules,*.png' \
		*.md Makefile bench demo docs packaging src systemd tests

postgres: need-postgres build ## Run the tests of the store and the ledger on PostgreSQL, and the conformance suite on it and over TLS
	@# Both at once, on two cores.
	$(CARGO) test --locked --features test-postgres --lib --test integration --no-run
	$(CARGO) test --locked --features test-postgres --lib -- \
		audit:: console::session:: database:: keys:: ledger:: recovery:: store::
	$(CARGO) test --locked --features test-postgres --test integration -- \
		postgres:: moving:: gateways:: budgets:: metrics::
	@# No case needs both, so one run does for both.
	$(PYTHON) tests/conformance/run.py --postgres --tls

tls: need-tls build ## Run over TLS: the conformance cases that need SQLite, and sslscan
	$(PYTHON) tests/conformance/run.py --sqlite-only --tls
	$(PYTHON) tests/outside/tls.py

openapi: need-openapi build .venv/ready ## Test the service against docs/openapi.yaml with Schemathesis
	.venv/bin/python tests/outside/openapi.py

attacks: need-attacks build ## Attack the service while honest clients use it
	$(PYTHON) tests/outside/slow_clients.py
	$(PYTHON) tests/outside/attacks.py

crashes: need-crashes build ## Check for lost rows after 12 kills and simulated power cuts under load
	$(PYTHON) tests/outside/crash.py

full-disk: need-full-disk build ## Fill the disk of the database, and make it read-only
	$(PYTHON) tests/outside/full_disk.py

search: need-search build ## Test grounding with a real Search server, which fails
	$(PYTHON) tests/outside/search.py

prometheus: need-prometheus build ## Test the metrics, alerts and dashboard with a real Prometheus
	$(PYTHON) tests/outside/metrics.py

clients: need-clients build .venv-clients/ready tests/clients/node_modules/ready tests/browser/node_modules/ready ## Run client libraries, and a chat interface in a real browser
	.venv-clients/bin/python tests/clients/run.py
	.venv-clients/bin/python tests/browser/interfaces.py

console: need-console build tests/browser/node_modules/ready ## Test the console in a real browser, with its accessibility
	$(PYTHON) tests/browser/run.py

model: need-model build ## Test the release binary with the real model of make run
	$(PYTHON) tests/outside/real_model.py

test-install: need-test-install deb image ## Test the package in a booted Debian, three proxies, little memory and the image (as root)
	$(PYTHON) tests/outside/install.py
	$(PYTHON) tests/outside/proxies.py
	$(PYTHON) tests/outside/small_memory.py
	$(PYTHON) tests/outside/image.py

test-cluster: need-test-cluster build ## Kill and replace the servers of a PostgreSQL cluster while gateways use it (as root)
	$(PYTHON) tests/cluster/run.py

# What make test-all does first, so that a link, which uses one core, and a download, which uses none, run beside other builds.
# The other environment, .venv, is made by lint, beside it.
downloads: .venv-clients/ready tests/clients/node_modules/ready tests/browser/node_modules/ready
	$(PYTHON) tests/outside/downloads.py

test-builds:
	$(CARGO) test --locked --no-run
	$(CARGO) test --locked --features test-postgres --lib --test integration --no-run

# Longer tests, and tests of other builds.

test-crash: need-crashes build ## Check for lost rows after 150 kills and simulated power cuts
	$(PYTHON) tests/outside/crash.py --crashes 150

test-arm64: ## Build for arm64; run the unit tests and the conformance suite under QEMU, and check the package
	$(MAKE) need-test-arm64 deb static ARCH=arm64
	$(PYTHON) tests/outside/arm64.py

open-webui: need-clients build .venv-open-webui/ready tests/browser/node_modules/ready ## Have a conversation in Open WebUI in a real browser (a download of 500 MB)
	.venv-open-webui/bin/python tests/browser/interfaces.py --open-webui

soak: need-soak build ## Run mixed load for SOAK_MINUTES (60), and fail if memory, files, threads or the WAL grow
	$(PYTHON) tests/outside/soak.py

bench: need-bench build bench-tools ## Compare the gateway with nginx and HAProxy; PEERS=1 adds other gateways
	$(PYTHON) bench/compare.py

bench-model: need-bench need-model build ## Measure what each gateway takes from a real model; PEERS=0 leaves the other gateways out
	$(PYTHON) bench/model.py

bench-memory: need-bench build ## Find the least memory for 4, 16 and 64 workers (as root)
	$(PYTHON) bench/memory.py

bench-docs: ## Write the last results of the other bench targets, and a picture of them, into README.md and docs/performance.md
	$(PYTHON) bench/publish.py

bench-scale: need-bench build bench-tools ## Measure how the cost grows: connections, bodies, keys, workers, and ROWS in the ledger
	$(PYTHON) bench/footprint.py
	$(PYTHON) bench/scale.py $(ROWS)

bench-database: need-bench need-test-cluster build ## Compare SQLite, one PostgreSQL server and a cluster of three (as root)
	$(PYTHON) bench/database.py

bench-years: need-bench build bench-tools ## Measure a ledger of ten million rows
	$(PYTHON) bench/years.py

bench-tools:
	$(BUILD) --example ledger

bench-console: need-bench build ## Measure what the console costs the API, and its pages with ten million rows
	$(PYTHON) bench/console.py

install: build generated ## Install below PREFIX (/usr/local) and SYSCONFDIR (/etc); DESTDIR is for packages
	install -D -m 755 target/release/adriaticum $(DESTDIR)$(PREFIX)/bin/adriaticum
	@# An existing configuration is kept.
	test -e $(DESTDIR)$(SYSCONFDIR)/adriaticum/adriaticum.toml || \
		install -D -m 644 target/generated/adriaticum.toml $(DESTDIR)$(SYSCONFDIR)/adriaticum/adriaticum.toml
	install -d $(DESTDIR)$(PREFIX)/lib/systemd/system
	sed 's:/usr/bin/adriaticum:$(PREFIX)/bin/adriaticum:' systemd/adriaticum.service \
		> $(DESTDIR)$(PREFIX)/lib/systemd/system/adriaticum.service
	install -m 644 systemd/adriaticum.socket systemd/adriaticum-runtime.service $(DESTDIR)$(PREFIX)/lib/systemd/system
	install -D -m 644 systemd/adriaticum.sysusers $(DESTDIR)$(PREFIX)/lib/sysusers.d/adriaticum.conf
	install -D -m 644 systemd/adriaticum.tmpfiles $(DESTDIR)$(PREFIX)/lib/tmpfiles.d/adriaticum.conf
	install -D -m 644 -t $(DESTDIR)$(PREFIX)/share/man/man1 target/generated/man1/*
	install -D -m 644 target/generated/adriaticum.toml.5 $(DESTDIR)$(PREFIX)/share/man/man5/adriaticum.toml.5
	install -D -m 644 target/generated/adriaticum.bash $(DESTDIR)$(PREFIX)/share/bash-completion/completions/adriaticum
	install -D -m 644 target/generated/_adriaticum $(DESTDIR)$(PREFIX)/share/zsh/site-functions/_adriaticum
	install -D -m 644 target/generated/adriaticum.fish $(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d/adriaticum.fish
	@test -n "$(DESTDIR)" || printf '%s\n' 'Installed. To start it:' \
		'  systemd-sysusers && systemd-tmpfiles --create adriaticum.conf && systemctl daemon-reload' \
		'  systemctl enable --now adriaticum.socket adriaticum.service'

uninstall: ## Remove what make install installed; the configuration and the data are kept
	@test -n "$(DESTDIR)" || ! test -d /run/systemd/system || systemctl disable --now adriaticum.socket \
		adriaticum.service adriaticum-runtime.service
	cd $(DESTDIR)$(PREFIX) && rm -f bin/adriaticum lib/systemd/system/adriaticum.service \
		lib/systemd/system/adriaticum.socket lib/systemd/system/adriaticum-runtime.service \
		lib/sysusers.d/adriaticum.conf lib/tmpfiles.d/adriaticum.conf share/man/man1/adriaticum*.1 \
		share/man/man5/adriaticum.toml.5 share/bash-completion/completions/adriaticum \
		share/zsh/site-functions/_adriaticum share/fish/vendor_completions.d/adriaticum.fish

# As with Debian's own tools, DEBFULLNAME and DEBEMAIL name the maintainer.
deb: export MAINTAINER := $(or $(DEBFULLNAME),The Adriaticum authors) <$(or $(DEBEMAIL),authors@adriaticum.invalid)>
deb: PACKAGES := target/debian/$(if $(filter $(HOST_ARCH),$(ARCH)),,$(ARCH)/)
deb: need-deb $(if $(filter $(HOST_ARCH),$(ARCH)),build,cross) generated sbom ## Build the Debian package, target/debian/adriaticum_*.deb; ARCH=arm64: target/debian/arm64/
	$(PYTHON) packaging/changelog.py > target/changelog
	@# Packages of earlier commits have other names, and the pattern for apt would match all of them.
	rm -f $(PACKAGES)adriaticum_*.deb
	cargo deb --locked --no-build --no-strip --maintainer "$$MAINTAINER" --deb-version "$$(packaging/version)-1" \
		--output $(PACKAGES) $(if $(filter $(HOST_ARCH),$(ARCH)),,--target $(MACHINE)-unknown-linux-gnu)

# Manual pages, completions and the sample configuration, from the program's own definitions.
generated:
	$(CARGO) run --locked --example generate target/generated

cross:
	$(CROSS) gnu build --release --locked
	@# cargo deb looks for it there.
	install -D -t target/$(MACHINE)-unknown-linux-gnu/release target/cross/$(MACHINE)-unknown-linux-gnu/release/adriaticum

sbom: ## Write the SBOM, target/adriaticum.cdx.json (CycloneDX), and the licenses of the libraries
	$(PYTHON) packaging/parts.py target/adriaticum.cdx.json target/THIRD-PARTY.gz

static: ## Build a static binary for any Linux, target/static/ARCH/adriaticum; ARCH=arm64: for arm64
	$(CROSS) musl build --release --locked
	install -D target/cross/$(MACHINE)-unknown-linux-musl/release/adriaticum $(STATIC)
	@! readelf --program-headers $(STATIC) | grep INTERP || { echo "$(STATIC) is not static"; exit 1; }
	@echo "$(STATIC) runs on any Linux of $(ARCH)"

image: need-image static ## Build a container image with buildah, target/image-ARCH.tar for podman load or docker load
	mkdir -p target/static/volume/data
	rm -rf target/static/zoneinfo
	cp -a /usr/share/zoneinfo target/static/
	cd target/static/zoneinfo && rm -rf posix right localtime posixrules leap*
	buildah build --quiet --arch $(ARCH) --build-arg TARGETARCH=$(ARCH) --timestamp $(SOURCE_DATE_EPOCH) --tag adriaticum \
		--file packaging/Containerfile target/static
	rm -f target/image-$(ARCH).tar
	buildah push --quiet adriaticum docker-archive:target/image-$(ARCH).tar:adriaticum:latest
	@echo "target/image-$(ARCH).tar is the image adriaticum, also in the local storage"

sizes: deb static ## Print sizes and the exposure of the unit, and fail if a second build is not identical
	$(PYTHON) packaging/sizes.py

fuzz: need-fuzz ## Fuzz the parsers of requests, JSON bodies, answers and documents, FUZZ_SECONDS each
	@for target in head chunked reader validator answer documents; do \
		mkdir -p tests/fuzz/corpus/$$target; \
		RUSTC_BOOTSTRAP=1 ASAN_OPTIONS=detect_odr_violation=0 cargo fuzz run --fuzz-dir tests/fuzz $$target tests/fuzz/corpus/$$target tests/fuzz/seeds/$$target -- \
			-max_total_time=$(FUZZ_SECONDS) || exit 1; \
	done

# A sixteenth of the mutants that .cargo/mutants.toml describes, some 50, another one each time. -j 2: two cores.
mutants: need-mutants ## Make about 50 random changes to the request path and the ledger; list those that no test detects
	timeout 90m cargo mutants --shard $$(shuf -i 0-15 -n 1)/16 --sharding round-robin -j 2 --output target

clean: ## Remove build results; var/, with the keys and the ledger of make run, is kept
	rm -rf target tests/fuzz/target .venv .venv-clients .venv-open-webui tests/clients/node_modules tests/browser/node_modules

requirements: ## Pin the Python packages of the tests again, with hashes (needs uv)
	for folder in tests/outside tests/clients tests/browser/open-webui; do \
		UV_CUSTOM_COMPILE_COMMAND="make requirements" uv pip compile --quiet --universal --python-version 3.11 --no-annotate \
			--generate-hashes --only-binary :all: --override tests/browser/open-webui/overrides.txt \
			$$folder/requirements.in -o $$folder/requirements.txt || exit 1; \
	done

.venv/ready: tests/outside/requirements.txt
.venv-clients/ready: tests/clients/requirements.txt
.venv-open-webui/ready: tests/browser/open-webui/requirements.txt
# Without its embedding models, which are not used here and take 5 GB.
.venv-open-webui/ready: PIP := --no-deps
.venv/ready .venv-clients/ready .venv-open-webui/ready:
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check --require-hashes --only-binary :all: $(PIP) -r $<
	@touch $@

tests/%/node_modules/ready: tests/%/package-lock.json
	npm ci --prefix tests/$* --silent --no-audit --no-fund
	@touch $@
