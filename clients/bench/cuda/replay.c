/* SPDX-License-Identifier: MIT */
/*
 * replay.c - see replay.h.
 */
#include "replay.h"

#include <stdio.h>
#include <stdlib.h>
#include <sysexits.h>

#include "../../common/measure.h"
#include "fill.h"

#define WARM_REPLAYS 2
#define CACHE_PASSES 3    /* of reading that fill the cache */
#define EDGES_MAX    4096 /* RIG_CHAIN_MAX steps of some six kernels, one after the other */

/* Kernels a launch ended with: what comes next must wait for them. */
struct joints {
    cudaGraphNode_t at[RIG_CHAIN_MAX];
    uint32_t count;
};

int rig_refuse(struct rig_gpu *gpu, int error, const char *what) {
    if (!error)
        return 0;
    snprintf(gpu->why, gpu->why_bytes, "%s: %s", what, cudaGetErrorString((cudaError_t)error));
    cudaGetLastError(); /* it is told */
    return error == cudaErrorMemoryAllocation ? EX_OSERR : EX_SOFTWARE;
}

/* ---- capture ---- */

static cudaError_t note_joint(cudaStream_t stream, struct joints *joints) {
    enum cudaStreamCaptureStatus status;
    const cudaGraphNode_t *last;
    const cudaGraphEdgeData *edges;
    size_t count = 0;
    cudaError_t error =
        cudaStreamGetCaptureInfo(stream, &status, NULL, NULL, &last, &edges, &count);

    if (!error && count)
        joints->at[joints->count++] = last[0]; /* one stream: one node */
    return error;
}

static bool is_joint(const struct joints *joints, cudaGraphNode_t node) {
    for (uint32_t i = 0; i < joints->count; i++)
        if (joints->at[i] == node)
            return true;
    return false;
}

/* Edges that leave a joint become full ones. */
static cudaError_t set_apart(cudaGraph_t graph, const struct joints *joints) {
    static cudaGraphNode_t from[EDGES_MAX], to[EDGES_MAX];
    static cudaGraphEdgeData data[EDGES_MAX];
    size_t edges = EDGES_MAX;
    cudaError_t error = cudaGraphGetEdges(graph, from, to, data, &edges);

    for (size_t i = 0; i < edges && !error; i++) {
        if (data[i].type == cudaGraphDependencyTypeDefault || !is_joint(joints, from[i]))
            continue;
        error = cudaGraphRemoveDependencies(graph, &from[i], &to[i], &data[i], 1);
        if (!error)
            error = cudaGraphAddDependencies(graph, &from[i], &to[i], NULL, 1);
    }
    return error;
}

static int capture(struct rig_gpu *gpu, replay_launch *launch, void *context, uint32_t chain,
                   struct joints *joints, cudaGraph_t *ret) {
    int error = (int)cudaStreamBeginCapture(gpu->stream, cudaStreamCaptureModeThreadLocal);

    if (error)
        return error;
    for (uint32_t i = 0; i < chain && !error; i++) {
        error = launch(context, i, gpu->stream);
        if (!error)
            error = (int)note_joint(gpu->stream, joints);
    }
    int ended = (int)cudaStreamEndCapture(gpu->stream, ret);
    return error ? error : ended;
}

/* ---- time ---- */

static cudaError_t replay_once(struct rig_gpu *gpu, cudaGraphExec_t exec, float *ret_ms) {
    cudaError_t error = cudaEventRecord(gpu->begun, gpu->stream);

    if (!error)
        error = cudaGraphLaunch(exec, gpu->stream);
    if (!error)
        error = cudaEventRecord(gpu->ended, gpu->stream);
    if (!error)
        error = cudaStreamSynchronize(gpu->stream);
    if (!error)
        error = cudaEventElapsedTime(ret_ms, gpu->begun, gpu->ended);
    return error;
}

static int fill_cache(struct rig_gpu *gpu) {
    int error = 0;

    for (uint32_t i = 0; i < CACHE_PASSES && !error; i++)
        error = bench_read_all(gpu->foreign, gpu->cache_bytes, 2 * gpu->processors, false, gpu->sum,
                               gpu->stream);
    return error;
}

static cudaError_t replay(struct rig_gpu *gpu, cudaGraphExec_t exec, double *us) {
    cudaError_t error = (cudaError_t)fill_cache(gpu);
    float ms = 0;

    for (uint32_t i = 0; i < WARM_REPLAYS && !error; i++)
        error = replay_once(gpu, exec, &ms);
    for (uint32_t i = 0; i < gpu->rounds && !error; i++) {
        error = replay_once(gpu, exec, &ms);
        us[i] = 1000.0 * (double)ms;
    }
    return error;
}

int replay_time(struct rig_gpu *gpu, replay_launch *launch, void *context, uint32_t chain,
                bool apart, double *ret_us) {
    double *us = calloc(gpu->rounds, sizeof(*us));
    struct joints joints = {.count = 0};
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    int error =
        us ? capture(gpu, launch, context, chain, &joints, &graph) : (int)cudaErrorMemoryAllocation;

    if (!error && apart)
        error = (int)set_apart(graph, &joints);
    if (!error)
        error = (int)cudaGraphInstantiate(&exec, graph, 0);
    if (!error)
        error = (int)cudaGraphUpload(exec, gpu->stream);
    if (!error)
        error = (int)replay(gpu, exec, us);
    if (!error)
        *ret_us = lk_percentile(us, gpu->rounds, 50) / chain;
    if (exec)
        cudaGraphExecDestroy(exec);
    if (graph)
        cudaGraphDestroy(graph);
    free(us);
    return rig_refuse(gpu, error, "a replay");
}
