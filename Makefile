# SPDX-License-Identifier: MIT
# locksd. `make help` lists the targets. Sources are found by folder: a new file needs no line here.

VERSION := 0.1.0
ABI     := 1
PREFIX  ?= /usr/local
DESTDIR ?=
SAN     ?=
O       ?= build/$(if $(SAN),$(subst $(comma),-,$(SAN)),plain)
comma   := ,

CC      ?= gcc
CFLAGS  ?= -O2 -g
WARN    := -Wall -Wextra -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wvla -Werror
STD     := -std=gnu17 -D_GNU_SOURCE -fno-math-errno -ffp-contract=off -fvisibility=hidden -pthread
SANF    := $(if $(SAN),-fsanitize=$(SAN) -fno-omit-frame-pointer -fno-sanitize-recover=all)
PKGS    := inih jansson libsystemd
INC     := -Ishm_protocol -Iclients
ALL_C   := $(STD) $(WARN) $(INC) $(CFLAGS) $(SANF) -DLK_VERSION='"$(VERSION)"' -fPIC -MMD -MP
LIBS    := -lm -lnuma
PKG_C    = $(shell pkg-config --cflags $(PKGS))
PKG_L    = $(shell pkg-config --libs $(PKGS))
CHECK_L  = $(shell pkg-config --libs check)

# Vector paths are chosen at run time; each file says by its name what it is compiled for.
%_avx2.o:   ISA := -mavx2 -mfma -mf16c
%_avx512.o: ISA := -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mavx2 -mfma -mf16c

obj = $(patsubst %.c,$(O)/%.o,$(wildcard $(addsuffix /*.c,$(1))))

SHM    := $(call obj,shm_protocol)
KERNEL := $(call obj,kernels kernels/cpu)
GRAPH  := $(call obj,graphs)
DAEMON := $(filter-out $(O)/daemon/main.o,$(call obj,daemon))
LIB    := $(call obj,clients/lib)
COMMON := $(call obj,clients/common)
REPLAY := $(call obj,clients/replay)
CTL    := $(call obj,clients/ctl)
BENCH  := $(call obj,clients/bench)
SO     := $(O)/liblocks.so.$(ABI)
TOOLS  := $(O)/locksd $(O)/locks-replay $(O)/locksctl $(O)/locks-bench
TESTS  := $(patsubst tests/%.c,$(O)/tests/%,$(wildcard tests/unit/test_*.c tests/model/test_*.c tests/fault/test_*.c))
TEST_COMMON := $(call obj,tests/common)

.PHONY: all
all: $(TOOLS) $(SO) $(O)/liblocks.a $(O)/hello  ## build everything

$(O)/%.o: %.c
	@mkdir -p $(@D)
	$(CC) $(ALL_C) $(PKG_C) $(ISA) -c $< -o $@

$(O)/locksd: $(O)/daemon/main.o $(DAEMON) $(GRAPH) $(KERNEL) $(SHM)
	$(CC) $(SANF) -pthread $^ -o $@ $(PKG_L) $(LIBS)
$(O)/liblocks.a: $(LIB) $(SHM)
	rm -f $@ && ar rcs $@ $^
$(SO): $(LIB) $(SHM) clients/lib/liblocks.map
	$(CC) $(SANF) -shared -pthread -Wl,-soname,liblocks.so.$(ABI) -Wl,--version-script,clients/lib/liblocks.map $(LIB) $(SHM) -o $@
	ln -sf $(@F) $(O)/liblocks.so
$(O)/locks-replay: $(REPLAY) $(COMMON) $(O)/liblocks.a
	$(CC) $(SANF) -pthread $^ -o $@ -ljansson $(LIBS)
$(O)/locksctl: $(CTL) $(COMMON) $(O)/liblocks.a
	$(CC) $(SANF) -pthread $^ -o $@ -ljansson $(LIBS)
$(O)/locks-bench: $(BENCH) $(COMMON) $(GRAPH) $(KERNEL) $(O)/liblocks.a
	$(CC) $(SANF) -pthread $^ -o $@ -ljansson $(LIBS)
$(O)/hello: $(O)/clients/examples/hello.o $(O)/liblocks.a
	$(CC) $(SANF) -pthread $^ -o $@ $(LIBS)
$(O)/tests/%: $(O)/tests/%.o $(TEST_COMMON) $(DAEMON) $(GRAPH) $(KERNEL) $(COMMON) $(LIB) $(SHM)
	@mkdir -p $(@D)
	$(CC) $(SANF) -pthread $^ -o $@ $(CHECK_L) $(PKG_L) $(LIBS)

.PHONY: tests
tests: $(TESTS)  ## build the test programs

.PHONY: clean
clean:  ## remove what was built
	rm -rf build

.PHONY: help
help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */  make \1|/' | column -t -s '|'

.SECONDARY:
-include $(shell find $(O) -name '*.d' 2>/dev/null)
