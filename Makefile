# What a person runs is what CI runs. `make` alone lists the targets.

PYTHON ?= python3
CONFORMANCE ?= ../shared/acceptance/conformance.py
FUZZ_SECONDS ?= 120

.DEFAULT_GOAL := help
.PHONY: help build run python test lint unit outside clients model test-crash bench bench-years fuzz clean

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

build: ## Build the release binary, target/release/adriaticum
	cargo build --release --locked

run: python build ## Start the service with a real model behind it; RUNTIME_URL=... uses a runtime of your own
	@$(PYTHON) runtime/run.py

# Before the build, so that nobody waits for it in vain.
python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
		echo "Python 3.10 or newer is needed, and $(PYTHON) is not. Install the package python3, or name another:" \
			"PYTHON=/path/to/python3 make run" >&2; exit 1; }

test: lint unit outside clients model ## Run every check

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

clients: build .venv-clients/ready ## Run six client libraries against the release binary
	@tests/outside/need 'command -v npm' npm
	npm ci --prefix tests/clients --silent --no-audit --no-fund
	.venv-clients/bin/python tests/clients/run.py

model: build ## Run the release binary in front of the real model, as make run does
	@tests/outside/need '$(PYTHON) -c "import ensurepip"' python3-venv
	@tests/outside/need 'command -v curl' curl
	$(PYTHON) tests/outside/real_model.py
	$(PYTHON) tests/outside/grounded_model.py

test-crash: build ## Kill the service 100 times and cut its power 50 times, and look for what is lost
	$(PYTHON) tests/outside/crash.py --kills 100
	$(PYTHON) tests/outside/power_cut.py --cuts 50

bench: build ## Print sizes and times, and what the ledger costs
	$(PYTHON) bench/footprint.py
	cargo build --release --locked --examples
	@tests/outside/need 'command -v wrk' wrk
	@tests/outside/need 'command -v nginx' nginx-light
	rm -f target/bench.db*
	target/release/examples/ledger target/bench.db
	$(PYTHON) bench/load.py

bench-years: build ## Print what a ledger of ten million rows costs
	cargo build --release --locked --examples
	@tests/outside/need 'command -v wrk' wrk
	@tests/outside/need 'command -v nginx' nginx-light
	$(PYTHON) bench/years.py

fuzz: ## Fuzz the request reader, the validator and the reader of documents, FUZZ_SECONDS each
	@cargo fuzz --version >/dev/null 2>&1 || cargo install cargo-fuzz --locked
	@for target in reader validator documents; do \
		mkdir -p fuzz/corpus/$$target; \
		RUSTC_BOOTSTRAP=1 ASAN_OPTIONS=detect_odr_violation=0 cargo fuzz run $$target fuzz/corpus/$$target fuzz/seeds/$$target -- \
			-max_total_time=$(FUZZ_SECONDS) || exit 1; \
	done

clean: ## Remove what was built; var/, with the keys and the ledger of make run, stays
	rm -rf target fuzz/target .venv .venv-clients tests/clients/node_modules

.venv/ready: tests/outside/requirements.txt
.venv-clients/ready: tests/clients/requirements.txt
.venv/ready .venv-clients/ready:
	@tests/outside/need '$(PYTHON) -c "import ensurepip"' python3-venv
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check -r $<
	@touch $@
