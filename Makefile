# SPDX-License-Identifier: MIT
# locksd. `make help` lists the targets. Sources are found by folder: a new file needs no line here.

VERSION := 0.1.0
ABI     := 1
PREFIX  ?= /usr/local
DESTDIR ?=
SAN     ?=
O       ?= build/$(if $(SAN),$(subst $(comma),-,$(SAN)),plain)
O_PLAIN := build/plain
O_ASAN  := build/address-undefined
O_TSAN  := build/thread
comma   := ,

CC      ?= gcc
AR      := gcc-ar
CFLAGS  ?= -O2 -g
WARN    := -Wall -Wextra -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wvla -Werror
# Threads of tools and tests have the stack that `ulimit -s` gives; sanitizers widen frames.
FRAME   := $(if $(SAN),,-Wframe-larger-than=131072)
STD     := -std=gnu17 -D_GNU_SOURCE -fno-math-errno -ffp-contract=off -fvisibility=hidden -pthread
# Sanitizers hide from the compiler what is initialised: it then warns of what is not so.
SANF    := $(if $(SAN),-fsanitize=$(SAN) -fno-omit-frame-pointer -fno-sanitize-recover=all -Wno-maybe-uninitialized)
# The path of a step crosses small files of client, ring and daemon: inlined into each other at link
# time an empty step takes 0.18 us instead of 0.20. Fat objects, so that the archive links anywhere.
LTO     := $(if $(SAN),,-flto=auto -ffat-lto-objects)
PKGS    := inih jansson libsystemd
INC     := -Ishm_protocol -Iclients
# HOOKS=1 O=build/hooks: what only tests ask of a daemon (tests/fault/test_device.c).
HOOKS   ?=
HOOKS_F := $(if $(HOOKS),-DLK_TEST_HOOKS)
ALL_C   := $(STD) $(WARN) $(FRAME) $(INC) $(CFLAGS) $(SANF) $(HOOKS_F) -DLK_VERSION='"$(VERSION)"' -fPIC -MMD -MP
LIBS    := -lm -lnuma
PKG_C    = $(shell pkg-config --cflags $(PKGS))
PKG_L    = $(shell pkg-config --libs $(PKGS))
CHECK_L  = $(shell pkg-config --libs check)

# Vector paths are chosen at run time; each file says by its name what it is compiled for.
%_avx2.o:   ISA := -mavx2 -mbmi2 -mfma -mf16c
%_avx512.o: ISA := -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mavx2 -mfma -mf16c

obj = $(patsubst %.c,$(O)/%.o,$(wildcard $(addsuffix /*.c,$(1))))

SHM    := $(call obj,shm_protocol)
KERNEL := $(call obj,kernels kernels/cpu kernels/cuda)
# The CUDA backend goes in where nvcc of CUDA 13 or later is, but for sanitizer builds; else refusals
# stand for it. The runtime is linked statically and opens libcuda itself, if there is one, at the
# first call. CUDA= leaves it out.
NVCC   ?= $(firstword $(wildcard /usr/local/cuda/bin/nvcc) $(shell command -v nvcc))
NVCC_IS := $(if $(NVCC),$(shell $(NVCC) --version | sed -n 's/.*release \([0-9]*\).*/\1/p'))
ifeq ($(origin CUDA),undefined)
CUDA   := $(if $(SAN),,$(shell [ "0$(NVCC_IS)" -ge 13 ] && echo yes))
endif
CUDA_HOME := $(abspath $(dir $(NVCC))/..)
GRAPH  := $(call obj,graphs)
ifneq ($(CUDA),)
GRAPH  += $(filter-out %/absent.o,$(call obj,graphs/cuda))
KERNEL += $(O)/cuda/liblkcuda.a
CUDA_L := -L$(CUDA_HOME)/lib64 -lcudart_static -ldl -lrt
$(O)/graphs/cuda/%.o $(O)/clients/bench/cuda/%.o: ISA := -I$(CUDA_HOME)/include
else
GRAPH  += $(O)/graphs/cuda/sizes.o $(O)/graphs/cuda/absent.o
endif
DAEMON := $(filter-out $(O)/daemon/main.o,$(call obj,daemon))
LIB    := $(call obj,clients/lib)
COMMON := $(call obj,clients/common)
REPLAY := $(call obj,clients/replay)
CTL    := $(call obj,clients/ctl)
BENCH  := $(call obj,clients/bench) $(O)/clients/bench/anchor.py.o
ifneq ($(CUDA),)
BENCH  += $(filter-out %/absent.o,$(call obj,clients/bench/cuda)) $(O)/clients/bench/cuda/fill.cu.o
else
BENCH  += $(O)/clients/bench/cuda/absent.o
endif
SO     := $(O)/liblocks.so.$(ABI)
TOOLS  := $(O)/locksd $(O)/locks-replay $(O)/locksctl $(O)/locks-bench
TESTS  := $(patsubst tests/%.c,$(O)/tests/%,$(wildcard tests/unit/test_*.c tests/model/test_*.c tests/fault/test_*.c))
TEST_COMMON := $(call obj,tests/common)

$(SHM) $(LIB) $(DAEMON) $(O)/daemon/main.o $(BENCH): ALL_C += $(LTO)

.PHONY: all
all: $(TOOLS) $(SO) $(O)/liblocks.a $(O)/hello  ## build everything

# What the compiler would stumble over, one by one.
.PHONY: needs
needs:
	@pkg-config --exists $(PKGS) 2>/dev/null || packaging/deps.sh --name build

$(O)/%.o: %.c | needs
	@mkdir -p $(@D)
	$(CC) $(ALL_C) $(PKG_C) $(ISA) -c $< -o $@

$(O)/%.py.o: %.py  # a script as bytes: _binary_PATH_start, _end
	@mkdir -p $(@D)
	$(LD) -r -b binary -z noexecstack $< -o $@

$(O)/locksd: $(O)/daemon/main.o $(DAEMON) $(GRAPH) $(KERNEL) $(SHM)
	$(CC) $(CFLAGS) $(LTO) $(SANF) -pthread $^ -o $@ $(PKG_L) $(LIBS) $(CUDA_L)
$(O)/liblocks.a: $(LIB) $(SHM)
	rm -f $@ && $(AR) rcs $@ $^
$(SO): $(LIB) $(SHM) clients/lib/liblocks.map
	$(CC) $(CFLAGS) $(LTO) $(SANF) -shared -pthread -Wl,-soname,liblocks.so.$(ABI) -Wl,--version-script,clients/lib/liblocks.map $(LIB) $(SHM) -o $@
	ln -sf $(@F) $(O)/liblocks.so
$(O)/locks-replay: $(REPLAY) $(COMMON) $(O)/kernels/geometry.o $(O)/liblocks.a
	$(CC) $(CFLAGS) $(LTO) $(SANF) -pthread $^ -o $@ -ljansson $(LIBS)
$(O)/locksctl: $(CTL) $(COMMON) $(O)/liblocks.a
	$(CC) $(CFLAGS) $(LTO) $(SANF) -pthread $^ -o $@ -ljansson $(LIBS)
$(O)/locks-bench: $(BENCH) $(COMMON) $(GRAPH) $(KERNEL) $(O)/liblocks.a
	$(CC) $(CFLAGS) $(LTO) $(SANF) -pthread $^ -o $@ -ljansson $(LIBS) $(CUDA_L)
$(O)/hello: $(O)/clients/examples/hello.o $(O)/liblocks.a
	$(CC) $(CFLAGS) $(LTO) $(SANF) -pthread $^ -o $@ $(LIBS)
$(O)/tests/%: $(O)/tests/%.o $(TEST_COMMON) $(DAEMON) $(GRAPH) $(KERNEL) $(COMMON) $(LIB) $(SHM)
	@mkdir -p $(@D)
	$(CC) $(SANF) -fno-lto -pthread $^ -o $@ $(CHECK_L) $(PKG_L) $(LIBS) $(CUDA_L)

.PHONY: tests tests-thread
tests: $(TESTS)  ## build the test programs
tests-thread: $(addprefix $(O)/tests/unit/,test_ring test_engine test_intake)

# ---- the main job, and the whole test command ----

JOBS  := -j$(shell nproc)
TRACE := tests/data/smollm2-needle.safetensors

.PHONY: demo
demo:  ## install what is missing, build, and replay a real trace through a private daemon
	@packaging/deps.sh build
	@[ -e $(O)/locksd ] || echo "building: $(if $(CUDA),the CUDA kernels take some minutes,one or two minutes)"
	@$(MAKE) --no-print-directory -s $(JOBS) all
	$(O)/locks-replay --trace $(TRACE) --budget 512 --sampled 16 --compare

.PHONY: check
check:  ## every test that needs no GPU, in three builds: plain, address+undefined, thread
	@packaging/deps.sh build test
	@$(MAKE) --no-print-directory -s $(JOBS) builds
	@tests/check.sh $(O_PLAIN) $(O_ASAN) $(O_TSAN)

# The three builds of `check` beside each other, so that one's last long file does not leave processors idle.
.PHONY: builds build-plain build-asan build-tsan
builds: build-plain build-asan build-tsan
build-plain: # tests of the kernels that the emulator runs too are left to `make cuda`
	@$(MAKE) --no-print-directory all tests emulated $(if $(CUDA),$(addprefix $(O)/cuda/test_,graph client))
build-asan:
	@$(MAKE) --no-print-directory SAN=address,undefined CFLAGS='-O1 -g' $(O_ASAN)/locksd $(O_ASAN)/locksctl tests
build-tsan:
	@$(MAKE) --no-print-directory SAN=thread CFLAGS='-O1 -g' tests-thread

.PHONY: check-oracle
check-oracle:  ## the full cross of options against the float64 reference (long)
	@packaging/deps.sh build test
	@$(MAKE) --no-print-directory -s $(JOBS) all
	@tests/tools/check-oracle.sh $(O_PLAIN) full

.PHONY: lint
lint:  ## clang-format, clang-tidy, cppcheck, shellcheck and the house rules
	@packaging/deps.sh build test lint
	@tests/tools/lint.sh

.PHONY: bench
bench: $(TOOLS)  ## measure this machine: latency of a step, bandwidth of the kernels
	$(O)/locks-bench latency
	$(O)/locks-bench cpu

.PHONY: install
install: all  ## install under DESTDIR/PREFIX
	@packaging/install.sh install "$(O)" "$(DESTDIR)" "$(PREFIX)" "$(VERSION)" "$(ABI)"

.PHONY: uninstall
uninstall:  ## remove what install put there, but the configuration
	@packaging/install.sh uninstall "$(O)" "$(DESTDIR)" "$(PREFIX)" "$(VERSION)" "$(ABI)"

.PHONY: clean
clean:  ## remove what was built
	rm -rf build

.PHONY: help
help:  ## this list
	@awk -F ':.*## *' '/^[a-z-]+:.*##/ {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

include kernels/cuda/cuda.mk

.SECONDARY:
-include $(shell find $(O) -name '*.d' 2>/dev/null)
