# make demo   train a small model, save it with Lightning's plugin and with ours, show the difference
# make test   the Python tests in two processes, and at the same time C tests under sanitizers
# make build  .venv in which `import stillframe` works
# make lint   ruff, mypy, clang-format, sentences (make format applies what ruff and clang-format ask for)
# make bench  what a save costs, compared with its peers, and what the machine could do at best
# make tsan, make valgrind   the C tests under those (make tsan-daily: six programs, others every day)
# make crash  every state a power failure can leave (its short form is part of make test)
# make stress     everything at once over tiny pools, plain and under TSAN, STRESS_S seconds each (make test: a short form)
# make small-pool   round trips, the mutation oracle and the faults again, in one and two blocks
# make lightning-suite      Trainer and Fabric runs on a fast, a slow (0.3 s) and a very slow (3 s) disk
# make lightning-versions   the Lightning tests under 2.4, 2.5 and the newest, of both packages
# make dcp-theirs PYTORCH=DIR            PyTorch's own tests of distributed checkpoints (DIR: its sources)
# make trainer-kills   kills a training with transformers' Trainer KILLS times (200), and looks what is left
# make transformers-theirs TRANSFORMERS=DIR   transformers' own tests of its Trainer (DIR: its sources) with ours
# make lightning-theirs LIGHTNING=DIR   Lightning's own checkpoint tests (DIR: its sources) with ours
# make mutants    mistakes in a copy of the tree, and whether tests notice: those that tools make in the
#                 lines that differ from BASE (or of FILES), and a short list of ours (ARGS='--only file/')
# make soak       SOAK saves, loads, snapshots, failures, ...: nothing is left of them (make test: 200 of each)
# make large      files of 0.3 to 9 GB, saved and loaded in every way (ARGS: those of tests/large/large.py; make test: in small)
# make campaign     random saves, loads, removes against a model, for as long as CAMPAIGN_S says
# make cuda-campaign   10^4 random schedules over the tests' CUDA driver (make test has 300)
# make offload-campaign  the same of groups that leave a device and come back (make test has 150), and
#                 2,000 random trainings with layers, activations or states offloaded (12),
#                 and layers compiled with torch's own compiler (none)
# make preempt-campaign   300 signals at random moments of a training, SIGKILL 5 s later: nothing is lost
#                 (make test has 10)
# make pictures   draws the pictures of README and docs from benchmarks/results/*.json (make tables: the tables)
# make recording  records the demo in a terminal, as docs/assets/demo.svg
# make docs   the documentation, into build/site: needs no network once its requirements are there
# make optimizers   the newest packages of third_party.toml: their optimizers, during saves
# make gpu    the tests and the benchmark that need a GPU, with a Python that has torch already
# make wheel-check      a wheel from a source distribution, looked over by auditwheel and abi3audit
# make wheel-versions   that wheel with torch 2.10, 2.11, 2.13 and the newest, as far as there are CPU builds
# make clean  removes what was built; make distclean removes .venv too
#
# Each target does everything it needs, from Python >= 3.11, a C compiler and make.
# PYTHON=python3.12, CC=clang, ARGS='arguments of the demo, of pytest, of
# vs_peers.py', DIR='a directory on the disk that make bench measures'.

PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=
LIMITS_ARGS ?=
LOAD_ARGS ?=
DIR    ?= .
JOBS   ?= $(shell nproc 2>/dev/null || echo 2)
ifeq ($(origin CC),default)
CC := cc
endif
export CC

PY     := $(VENV)/bin/python
PIP    := $(PY) -m pip --disable-pip-version-check
WERROR := $(if $(filter 1,$(STILLFRAME_WERROR)),-Werror)

.PHONY: build demo test bench pictures recording tables docs lint format asan tsan tsan-daily valgrind crash stress small-pool large campaign cuda-campaign offload-campaign preempt-campaign mutants optimizers soak gpu \
	lightning-suite lightning-versions lightning-theirs dcp-theirs transformers-theirs trainer-kills wheel-check wheel-versions clean distclean
.DELETE_ON_ERROR:
.SECONDARY:

# ---- the package --------------------------------------------------------------------------

# Named after the switches of setup.py, so that other switches build anew.
comma   := ,
BUILT   := build/built$(subst $(comma),-,$(STILLFRAME_SANITIZE:%=-%)$(WERROR)$(STILLFRAME_COVERAGE:%=-coverage%))
SOURCES := $(shell find csrc tests/c/cuda -name "*.[ch]*")

build: $(BUILT)

$(BUILT): $(VENV)/.requirements pyproject.toml setup.py $(SOURCES)
	@rm -f build/built*
	$(PIP) install --quiet --no-build-isolation --no-deps --editable .
	$(PY) -c 'import stillframe'
	@touch $@

# torch first and alone: its wheel decides what the rest has to fit. Everything is pinned.
$(VENV)/.requirements: requirements.txt | $(VENV)/bin/pip
	$(PIP) install --constraint requirements.txt $$(grep '^torch==' requirements.txt)
	$(PIP) install --requirement requirements.txt
	@touch $@

$(VENV)/bin/pip:
	@command -v $(PYTHON) >/dev/null || { \
		echo "stillframe needs Python 3.11 or later; '$(PYTHON)' is not there (make PYTHON=...)" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "stillframe needs Python 3.11 or later; $(PYTHON) is $$($(PYTHON) -V 2>&1) (make PYTHON=...)" >&2; exit 1; }
	@compiler='$(CC)'; command -v $${compiler%% *} >/dev/null || { \
		echo "stillframe needs a C compiler; '$$compiler' is not there (make CC=...)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { \
		echo "$(PYTHON) cannot make virtual environments: install its venv package (Debian: python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

demo: build
	$(PY) examples/demo/demo.py $(ARGS)

# The Python tests run in two processes of pytest at the same time (ARGS: in one), which take about
# equally long. Of the C programs, six run under ThreadSanitizer too, others every day. They mostly
# wait, for disks and for one another, so they run at the same time as pytest. The output of the
# second process and of the C programs goes to logs, and follows that of the first process.
TEST_LOG     := build/other-tests.log
C_LOG        := build/c-tests.log
FIRST_TESTS  := $(addprefix tests/,mutants oracle preempt remote unit)
SECOND_TESTS := $(filter-out $(FIRST_TESTS) %/__pycache__,$(patsubst %/,%,$(wildcard tests/*/)))

test: build
	@$(MAKE) --no-print-directory -j$(JOBS) programs-asan
	@echo "C tests run at the same time and follow in $(C_LOG)$(if $(ARGS),,, other Python tests in $(TEST_LOG))"; \
	$(MAKE) --no-print-directory asan $(if $(ARGS),,tsan-daily) >$(C_LOG) 2>&1 & c=$$!; \
	$(if $(ARGS),:,$(PY) -m pytest $(SECOND_TESTS)) >$(TEST_LOG) 2>&1 & others=$$!; \
	trap 'kill $$c $$others' INT TERM; \
	$(PY) -m pytest $(or $(ARGS),$(FIRST_TESTS)); status=$$?; \
	wait $$others || status=1; \
	wait $$c || status=1; \
	cat $(TEST_LOG) $(C_LOG); exit $$status

BASE  ?= HEAD
FILES ?=

mutants: build $(VENV)/.mutants
	@$(MAKE) --no-print-directory -j$(JOBS) programs-plain
	$(VENV)/mutants/bin/python tests/mutants/changed.py --python $(abspath $(PY)) --base $(BASE) $(if $(FILES),--files $(FILES))
	$(PY) tests/mutants/mistakes.py $(ARGS)

# In an environment of their own: their dependencies stay out of ours.
$(VENV)/.mutants: tests/mutants/requirements.txt $(VENV)/.requirements
	$(PYTHON) -m venv $(VENV)/mutants
	$(VENV)/mutants/bin/pip --disable-pip-version-check install --quiet --requirement tests/mutants/requirements.txt
	@touch $@

# A JSON and a PNG each in build/. ARGS are those of vs_peers.py alone, LOAD_ARGS those of restore.py.
bench: build $(VENV)/.bench
	$(PY) benchmarks/limits.py --dir $(DIR) --json build/limits.json $(LIMITS_ARGS)
	$(PY) benchmarks/restore.py --dir $(DIR) --json build/restore.json $(LOAD_ARGS)
	$(PY) benchmarks/vs_peers.py --dir $(DIR) --json build/vs_peers.json $(ARGS)

# What README and docs show, from the figures that are in the tree.
pictures: $(VENV)/.bench
	$(PY) benchmarks/pictures.py --out docs/assets benchmarks/results/*.json

# The demo in a terminal, as the quick start shows it: three minutes, on a quiet machine. ARGS='--size 300MB'.
recording: build $(VENV)/.bench
	$(PY) benchmarks/recording.py --out docs/assets/demo.svg $(ARGS)
	$(PY) benchmarks/tables.py

# The tables of README and docs, from the same.
tables: build
	$(PY) benchmarks/tables.py

$(VENV)/.bench: benchmarks/requirements.txt $(VENV)/.requirements
	$(PIP) install --constraint requirements.txt --requirement benchmarks/requirements.txt
	@touch $@

# The pages ask nobody else for scripts, styles or fonts.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --clean
	@! grep -rhoE '(src|href)="(https?:)?//[^"]*[.](js|css|woff2?|png|svg)"' build/site --include='*.html'
	@echo "build/site/index.html"

$(VENV)/.docs: docs/requirements.txt $(VENV)/.requirements
	$(PIP) install --constraint requirements.txt --requirement docs/requirements.txt
	@touch $@

lint: $(VENV)/.requirements
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	MYPYPATH=python $(PY) -m mypy --strict examples
	@echo "clang-format: $(words $(C_FORMATTED)) files"
	@$(VENV)/bin/clang-format --dry-run --Werror $(C_FORMATTED)
	@$(PY) tests/lint_prose.py

format: $(VENV)/.requirements
	$(PY) -m ruff check --fix-only .
	$(PY) -m ruff format .
	$(VENV)/bin/clang-format -i $(C_FORMATTED)

# ---- what is released -----------------------------------------------------------------------

WHEEL_TORCHES ?= 2.10.0 2.11.0 2.13.0 newest
WHEEL         := build/wheel/built

# From a source distribution, so that both are tried. Wheels for everybody are built by cibuildwheel
# in the manylinux image, by .github/workflows/release.yml; this one runs on machines like this one.
wheel-check: $(WHEEL) $(VENV)/.wheel
	$(VENV)/wheel/bin/python tests/wheel/wheel.py check build/wheel/*.whl

wheel-versions: $(WHEEL)
	$(PY) tests/wheel/wheel.py versions build/wheel/*.whl $(WHEEL_TORCHES)

$(WHEEL): $(VENV)/.requirements $(SOURCES) pyproject.toml setup.py MANIFEST.in $(shell find python -name "*.py")
	@rm -rf $(@D) && mkdir -p $(@D)
	$(PY) setup.py --quiet egg_info --egg-base $(@D) sdist --dist-dir $(@D)
	STILLFRAME_STRIP=1 $(PIP) wheel --quiet --no-build-isolation --no-deps --wheel-dir $(@D) $(@D)/*.tar.gz
	@touch $@

# In an environment of their own: what they need is no business of ours. None is no failure.
$(VENV)/.wheel: $(VENV)/.requirements
	$(PYTHON) -m venv $(VENV)/wheel
	-$(VENV)/wheel/bin/pip --disable-pip-version-check install --quiet auditwheel==6.8.2 abi3audit==0.0.26
	@touch $@

# ---- the C tests: programs of their own, each in a process of its own -----------------------

C_FORMATTED := $(shell find csrc tests/c -name "*.[ch]" | LC_ALL=C sort)
C_HEADERS   := $(filter csrc/core/%.h,$(C_FORMATTED))
C_TEST_HEADERS := $(filter tests/c/%.h,$(C_FORMATTED))
C_CORE      := $(patsubst csrc/core/%.c,%.o,$(filter csrc/core/%.c,$(C_FORMATTED)))
FAKE_CUDA   := $(filter tests/c/cuda/fake_cuda%.c,$(C_FORMATTED))
C_TESTS     := $(basename $(notdir $(wildcard tests/c/*/test_*.c)))
vpath test_%.c $(wildcard tests/c/*/)
C_FLAGS     := -std=c11 -D_GNU_SOURCE -DSFR_CHECK_LOCKS -pthread -O1 -g -fno-omit-frame-pointer -Wall -Wextra -Wshadow \
	       -Wstrict-prototypes -Wmissing-prototypes -Wconversion $(WERROR)
C_RUN        = $(PYTHON) tests/c/run.py

# $(1): the variant's name, $(2): its flags. The core is compiled once for all of its tests. The
# CUDA driver of the tests is in the same directory: they load it as they would a real one.
define variant
C_PROGRAMS_$(1) := $(C_TESTS:%=build/$(1)/%)
.PHONY: programs-$(1)
programs-$(1): $$(C_PROGRAMS_$(1)) build/$(1)/libfake_cuda.so
build/$(1)/core/%.o: csrc/core/%.c $(C_HEADERS)
	@mkdir -p $$(@D) && echo "  $(1) $$<"
	@$(CC) $(C_FLAGS) $(2) -Icsrc/core -c $$< -o $$@
build/$(1)/libfake_cuda.so: $(FAKE_CUDA) $(C_HEADERS) $(C_TEST_HEADERS)
	@mkdir -p $$(@D) && echo "  $(1) $$@"
	@$(CC) $(C_FLAGS) $(2) -fPIC -shared -Icsrc/core -Itests/c $(FAKE_CUDA) -o $$@
build/$(1)/test_%: test_%.c $(C_HEADERS) $(C_TEST_HEADERS) $(C_CORE:%=build/$(1)/core/%)
	@echo "  $(1) $$<"
	@$(CC) $(C_FLAGS) $(2) -Icsrc/core -Itests/c $$(filter %.c %.o,$$^) -ldl -o $$@
endef
$(eval $(call variant,asan,-fsanitize=address$(comma)undefined -fno-sanitize-recover=all))
$(eval $(call variant,tsan,-fsanitize=thread))
$(eval $(call variant,plain,))
# No wait looks again by itself (sfr__cond_wait), so a lost wake-up hangs: mistakes.py notices that.
$(eval $(call variant,still,-DSFR_WAKE_UP_NS=3600000000000u))

asan:
	@$(MAKE) --no-print-directory -j$(JOBS) programs-asan
	@$(C_RUN) asan $(C_PROGRAMS_asan)

tsan:
	@$(MAKE) --no-print-directory -j$(JOBS) programs-tsan
	@$(C_RUN) tsan $(C_PROGRAMS_tsan)

# The stress program and five others, others every day: all of them take some six minutes.
tsan-daily: C_PROGRAMS_today := build/tsan/test_stress $(shell $(C_RUN) daily 5 $(filter-out %/test_stress,$(C_PROGRAMS_tsan)))
tsan-daily:
	@$(MAKE) --no-print-directory -j$(JOBS) $(C_PROGRAMS_today) build/tsan/libfake_cuda.so
	@$(C_RUN) tsan $(C_PROGRAMS_today)

valgrind:
	@$(MAKE) --no-print-directory -j$(JOBS) programs-plain
	@$(C_RUN) valgrind $(C_PROGRAMS_plain)

crash:
	@$(MAKE) --no-print-directory -j$(JOBS) build/plain/test_crash
	CHECK_CRASH=full build/plain/test_crash

STRESS_S ?= 300

stress:
	@$(MAKE) --no-print-directory -j$(JOBS) build/plain/test_stress build/tsan/test_stress
	CHECK_STRESS_S=$(STRESS_S) build/plain/test_stress
	CHECK_STRESS_S=$(STRESS_S) $(C_STRESS_TSAN) build/tsan/test_stress

# Its shadow memory collides with a highly randomised address space (gcc before 14).
C_STRESS_TSAN = TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1 $(shell command -v setarch >/dev/null && echo setarch -R)

# ---- long runs of the Python tests -----------------------------------------------------------

CAMPAIGN_S ?= 600

small-pool: build
	STILLFRAME_TEST_POOL=1 $(PY) -m pytest $(SMALL_POOL) $(ARGS)
	STILLFRAME_TEST_POOL=2 $(PY) -m pytest $(SMALL_POOL) $(ARGS)
SMALL_POOL := tests/unit/test_round_trip.py tests/unit/save/test_save.py tests/oracle/test_mutation_oracle.py \
	      tests/fault

campaign: build
	STILLFRAME_CAMPAIGN_SECONDS=$(CAMPAIGN_S) $(PY) -m pytest tests/unit/save/test_model.py $(ARGS)

SOAK ?= 10000

soak: build
	STILLFRAME_SOAK=$(SOAK) $(PY) -m pytest -s tests/unit/test_leaks.py --timeout 7200 $(ARGS)

# Needs 12 GB of memory and 10 GB of disk (ARGS='--dir DIR --memory GB'); skips by name what does not fit.
large: build
	$(PY) tests/large/large.py $(ARGS)

SCHEDULES ?= 10000
TRAININGS ?= 2000

cuda-campaign:
	@$(MAKE) --no-print-directory -j$(JOBS) build/plain/test_cuda_schedules build/plain/libfake_cuda.so
	STILLFRAME_SCHEDULES=$(SCHEDULES) build/plain/test_cuda_schedules

preempt-campaign: build
	PYTHONPATH=tests/preempt:tests/unit $(PY) tests/preempt/preempt_campaign.py $(ARGS)

offload-campaign:
	@$(MAKE) --no-print-directory -j$(JOBS) build/plain/test_offload_schedules build/plain/libfake_cuda.so
	STILLFRAME_SCHEDULES=$(SCHEDULES) build/plain/test_offload_schedules
	@$(MAKE) --no-print-directory build
	STILLFRAME_TRAININGS=$(TRAININGS) STILLFRAME_TRAININGS_S=$(CAMPAIGN_S) $(PY) -m pytest -s --timeout 3600 tests/offload/test_random_trainings.py \
		tests/offload/test_layers_compiled.py $(ARGS)

# ---- Lightning ---------------------------------------------------------------------------------

LIGHTNING ?=
LIGHTNING_VERSIONS ?= 2.4.0 2.5.6 newest

lightning-suite: build
	STILLFRAME_TEST_LIGHTNING=full $(PY) -m pytest tests/lightning --timeout 1200 $(ARGS)

# The name of a directory here is a version; both packages go into it, and what they need is in
# the venv.
.PRECIOUS: build/lightning-%/installed
build/lightning-%/installed: | build
	@rm -rf $(@D)
	$(PIP) install --quiet --no-deps --target $(@D) \
		$(if $(filter newest,$*),lightning pytorch-lightning,lightning==$* pytorch-lightning==$*)
	@touch $@

lightning-versions: build $(LIGHTNING_VERSIONS:%=build/lightning-%/installed)
	@for version in $(LIGHTNING_VERSIONS); do \
		echo "---- Lightning $$version"; \
		PYTHONPATH=$(CURDIR)/build/lightning-$$version:$$PYTHONPATH $(PY) -m pytest tests/lightning $(ARGS) \
			|| exit 1; done

# git clone --branch 2.6.5 https://github.com/Lightning-AI/pytorch-lightning DIR
lightning-theirs: build
	$(PY) tests/theirs/theirs_lightning.py $(LIGHTNING) $(ARGS)

dcp-theirs: build
	$(PY) tests/theirs/theirs_dcp.py $(PYTORCH) $(ARGS)

# ---- Hugging Face -------------------------------------------------------------------------------

KILLS ?= 200

# git clone --branch v5.23.0 https://github.com/huggingface/transformers DIR
transformers-theirs: build
	$(PY) tests/theirs/theirs_trainer.py $(TRANSFORMERS) $(ARGS)

# A training is killed KILLS times, with transformers' own Trainer too. On a disk: not in /tmp if that is memory.
trainer-kills: build
	@mkdir -p build
	PYTHONPATH=tests/huggingface:tests/unit HF_HUB_OFFLINE=1 $(PY) -W ignore tests/huggingface/trainer_kills.py \
		build/trainer-kills --kills $(KILLS) $(ARGS)

# ---- optimizers of other packages ---------------------------------------------------------------

OPTIMIZERS = $(shell sed -n 's/^distribution = "\(.*\)"/\1/p' python/stillframe/*/third_party.toml)

optimizers: build
	$(PIP) install --quiet --no-deps --upgrade --target build/optimizers $(OPTIMIZERS)
	PYTHONPATH=$(CURDIR)/build/optimizers:$$PYTHONPATH $(PY) -m pytest tests/oracle/test_third_party.py $(ARGS)

# ---- what needs a GPU -------------------------------------------------------------------------

# Nothing is installed or fetched: GPU_PY has torch, Lightning, rich and pytest, and by default is
# the first of these whose torch sees a device. Each part (benchmarks/gpu_first.py has the list) ends
# within ten minutes, whatever becomes of the others; GPU_OUT gets their figures and logs.
GPU_PY    ?=
GPU_PARTS ?=
GPU_OUT   ?= build/gpu

gpu:
	@py='$(GPU_PY)'; \
	for each in $(PY) $(PYTHON) python3; do \
		[ -z "$$py" ] || break; \
		command -v $$each >/dev/null || continue; \
		$$each -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null || continue; \
		py=$$each; \
	done; \
	if [ -z "$$py" ]; then \
		echo "make gpu skips: none of $(PY), $(PYTHON), python3 has a torch that sees a GPU" \
			"(name one with GPU_PY=...)"; \
		exit 0; \
	fi; \
	$$py setup.py -q build_ext --inplace && \
	$$py benchmarks/gpu_first.py --dir $(DIR) --out $(GPU_OUT) $(if $(GPU_PARTS),--parts $(GPU_PARTS)) $(ARGS)

# ---------------------------------------------------------------------------------------------

clean:
	rm -rf build dist python/*.egg-info python/stillframe/*.so

distclean: clean
	rm -rf $(VENV)
