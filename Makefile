# What a person runs is what CI runs. `make` alone lists the targets.

PYTHON ?= python3
CONFORMANCE ?= ../shared/acceptance/conformance.py
FUZZ_SECONDS ?= 120

.DEFAULT_GOAL := help
.PHONY: help build run test lint unit outside bench fuzz clean

help: ## List the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

build: ## Build the release binary, target/release/adriaticum
	cargo build --release --locked

run: build ## Start the service, with a key made on first use
	@$(PYTHON) runtime/run.py

test: lint unit outside ## Run every check: lint, unit and integration tests, and the checks from outside

lint: ## Check the format, the lints and the documentation
	cargo fmt --check
	cargo clippy --all-targets --locked -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --no-deps --document-private-items --locked

unit: ## Run the unit and integration tests
	cargo test --locked

outside: build .venv/ready ## Hold the release binary to the contract, the OpenAPI document and slow clients
	@test -x $(CONFORMANCE) || { echo "$(CONFORMANCE) is not there. CONFORMANCE=... names another place."; exit 1; }
	$(CONFORMANCE) -search
	.venv/bin/python tests/outside/openapi.py
	@tests/outside/need 'command -v slowhttptest' slowhttptest
	$(PYTHON) tests/outside/slow_clients.py

bench: build ## Print the size of the binary, the idle memory and the time to the first answer
	$(PYTHON) bench/footprint.py

fuzz: ## Fuzz the request reader and the validator, FUZZ_SECONDS each
	@cargo fuzz --version >/dev/null 2>&1 || cargo install cargo-fuzz --locked
	@for target in reader validator; do \
		mkdir -p fuzz/corpus/$$target; \
		RUSTC_BOOTSTRAP=1 ASAN_OPTIONS=detect_odr_violation=0 cargo fuzz run $$target fuzz/corpus/$$target fuzz/seeds/$$target -- \
			-max_total_time=$(FUZZ_SECONDS) || exit 1; \
	done

clean: ## Remove what was built; var/, with the keys and the ledger of make run, stays
	rm -rf target fuzz/target .venv

.venv/ready: tests/outside/requirements.txt
	@tests/outside/need '$(PYTHON) -c "import ensurepip"' python3-venv
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet --disable-pip-version-check -r $<
	@touch $@
