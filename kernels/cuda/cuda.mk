# SPDX-License-Identifier: MIT
# The CUDA kernels as a library, their tests, and the kernels of locks-bench. Included by the root Makefile; needs nvcc only.
#   make cuda         library and tests (does nothing, and says so, where there is no nvcc)
#   make check-cuda   run the tests (they say so and exit 77 where there is no device)
#   make racecheck    build/racecheck/cuda/test_step, for compute-sanitizer --tool racecheck
#   make emulated     the kernels that compute and their tests for the host (tests/cuda/emulator); needs g++ only

CUDA_O     := $(O)/cuda
CUDA_ARCH  ?= -gencode=arch=compute_90a,code=sm_90a -gencode=arch=compute_80,code=compute_80
CUDA_FLAGS := -std=c++17 -O3 -Xcompiler=-fPIC,-Wall,-fno-exceptions,-fno-threadsafe-statics -Werror=all-warnings $(HOOKS_F) $(CUDA_DEFINE) $(CUDA_ARCH)
CUDA_OBJ   := $(patsubst kernels/cuda/%.cu,$(CUDA_O)/%.o,$(wildcard kernels/cuda/*.cu)) $(O)/kernels/cuda/plan.o
CUDA_BIN   := $(patsubst tests/cuda/%.cu,$(CUDA_O)/%,$(wildcard tests/cuda/test_*.cu))

.PHONY: cuda check-cuda racecheck
ifeq ($(CUDA),)
cuda check-cuda racecheck:
	@echo "no nvcc of CUDA 13 or later: the CUDA kernels are not built"
else
cuda: $(CUDA_O)/liblkcuda.a $(CUDA_BIN)  ## compile the CUDA kernels and their tests, where nvcc is

check-cuda: cuda  ## run the CUDA tests; they skip themselves where there is no device
	@for t in $(CUDA_BIN); do $$t; s=$$?; [ $$s = 0 ] || [ $$s = 77 ] || exit 1; done

racecheck:
	@$(MAKE) --no-print-directory O=build/racecheck CUDA_DEFINE=-DLK_RACECHECK build/racecheck/cuda/test_step

$(CUDA_O)/%.o: kernels/cuda/%.cu $(wildcard kernels/cuda/*.h kernels/cuda/*.cuh kernels/*.h)
	@mkdir -p $(@D)
	$(NVCC) $(CUDA_FLAGS) -c $< -o $@
$(CUDA_O)/liblkcuda.a: $(CUDA_OBJ)
	rm -f $@ && ar rcs $@ $^
$(O)/clients/bench/cuda/%.cu.o: clients/bench/cuda/%.cu $(wildcard clients/bench/*.h clients/bench/cuda/*.h kernels/*.h)
	@mkdir -p $(@D)
	$(NVCC) $(CUDA_FLAGS) -c $< -o $@
CLIENT_OBJ := $(addprefix $(O)/,clients/common/private.o clients/common/deadly.o clients/common/measure.o liblocks.a)
$(CUDA_O)/test_client: tests/cuda/test_client.cu clients/locks_device.cuh tests/cuda/common.h $(CLIENT_OBJ)
	$(NVCC) -std=c++17 -O2 -Ishm_protocol -Iclients -gencode=arch=compute_90a,code=sm_90a $< $(CLIENT_OBJ) -o $@
$(CUDA_O)/%: tests/cuda/%.cu $(CUDA_O)/liblkcuda.a $(wildcard tests/cuda/*.h)
	$(NVCC) -std=c++17 -O2 -gencode=arch=compute_90a,code=sm_90a $< $(CUDA_O)/liblkcuda.a -o $@
endif

EMU_O     := $(O)/emulated
EMU_FLAGS := -std=c++17 -O2 -mavx2 -mfma -mf16c -fno-strict-aliasing -Wall -Werror -Wno-unknown-pragmas -Wno-sign-compare -Wno-maybe-uninitialized -Wno-format-truncation -Itests/cuda/emulator
EMU_HEADS := $(wildcard tests/cuda/emulator/*.h tests/cuda/*.h kernels/cuda/*.h kernels/cuda/*.cuh kernels/*.h)
EMU_OBJ   := $(patsubst %,$(EMU_O)/%.o,threads store build build_pages build_super scan rescan select attend attend_plain) $(O)/kernels/cuda/plan.o

.PHONY: emulated
emulated: $(EMU_O)/test_build $(EMU_O)/test_step $(EMU_O)/replay  ## compile the CUDA kernels for the host, thread by thread, and their tests
$(EMU_O)/%.o: kernels/cuda/%.cu $(EMU_HEADS)
	@mkdir -p $(@D)
	$(CXX) $(EMU_FLAGS) -include tests/cuda/emulator/instructions.h -x c++ -c $< -o $@
$(EMU_O)/threads.o: tests/cuda/emulator/threads.cpp $(EMU_HEADS)
	@mkdir -p $(@D)
	$(CXX) $(EMU_FLAGS) -c $< -o $@
# locks-replay with the kernels in the daemon's place.
EMU_REPLAY := $(COMMON) $(addprefix $(O)/clients/replay/,options.o trace.o out.o) $(O)/kernels/geometry.o $(O)/liblocks.a
$(EMU_O)/replay: tests/cuda/replay.cu $(EMU_OBJ) $(EMU_REPLAY) $(EMU_HEADS) $(wildcard clients/replay/*.h)
	$(CXX) $(EMU_FLAGS) $(INC) -include tests/cuda/emulator/instructions.h -x c++ $< -x none $(EMU_OBJ) $(EMU_REPLAY) -ljansson $(LIBS) -o $@
$(EMU_O)/%: tests/cuda/%.cu $(EMU_OBJ) $(EMU_HEADS)
	$(CXX) $(EMU_FLAGS) -include tests/cuda/emulator/instructions.h -x c++ $< -x none $(EMU_OBJ) -o $@
