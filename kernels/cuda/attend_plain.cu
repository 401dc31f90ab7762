/* SPDX-License-Identifier: MIT */
/*
 * attend_plain.cu - attention for head dimensions that tensor cores have no kernel for: a warp
 * takes a token at a time, a lane every 32nd channel.
 *
 * Slower by far and simple; jobs, merging and edge cases are those of attend.cu.
 */
#include "attend.cuh"

#define CHANNELS (LK_HEAD_DIM_MAX / 32)

struct shared {
    struct job job;
    struct held_row row;
    alignas(16) struct lk_cuda_head found;
    struct lk_cuda_stat stat[WARPS][QUERIES];
    alignas(16) float mass[WARPS * QUERIES];
    uint32_t last;
    alignas(16) float out[4]; /* [warp][query][d + 4] */
};

__device__ __forceinline__ float *warp_out(struct shared *s, uint32_t warp, uint32_t query,
                                           uint32_t d) {
    return s->out + ((uint64_t)warp * QUERIES + query) * (d + 4);
}

/* ---- merging: a warp a query, a lane four channels and the same 128 further on ---- */

__device__ void store_query(const struct attend_args &a, struct shared *s, uint32_t q,
                            const float4 sum[2], const struct lk_cuda_stat &all) {
    const uint32_t lane = threadIdx.x % 32, d = a.pool.geometry.head_dim;
    const float scale = all.mass > 0 ? 1.f / all.mass : 0.f;
    float *out = s->job.out + (uint64_t)query_index(a, s->job, q) * d;

    for (int x = 0; x < 2; x++)
        if (128 * x + 4 * lane < d)
            *(float4 *)&out[128 * x + 4 * lane] =
                make_float4(sum[x].x * scale, sum[x].y * scale, sum[x].z * scale, sum[x].w * scale);
    if (lane == 0)
        s->mass[q] = finish_query(s->job, &s->found, q, query_index(a, s->job, q), all);
}

/* `parts` states of a query, in order; part i's are at(i) and out(i). */
template <class S, class O>
__device__ __forceinline__ struct lk_cuda_stat add_parts(uint32_t d, uint32_t parts, S at, O out,
                                                         float4 sum[2]) {
    const uint32_t lane = threadIdx.x % 32;
    struct lk_cuda_stat all = {-INFINITY, 0.f, 0.f, 0.f};

    for (uint32_t i = lane; i < parts; i += 32)
        all.peak = fmaxf(all.peak, at(i).x);
    all.peak = warp_max(all.peak);
    for (uint32_t base = 0; base < parts; base += 32) {
        const float4 v = base + lane < parts ? at(base + lane) : make_float4(-INFINITY, 0, 0, 0);
        const float f = shrink(v.x, all.peak);
        all.mass = fmaf(v.y, f, all.mass);
        all.kept = fmaf(v.z, f, all.kept);
        for (uint32_t i = 0; i < min(32u, parts - base); i++) {
            const float g = __shfl_sync(LK_FULL_WARP, f, i);
            for (int x = 0; x < 2; x++)
                if (128 * x + 4 * lane < d)
                    add_scaled(&sum[x], *(const float4 *)(out(base + i) + 128 * x + 4 * lane), g);
        }
    }
    all.mass = warp_sum(all.mass);
    all.kept = warp_sum(all.kept);
    return all;
}

/* Warps have left their state in shared memory: to the output, or to the slice's partial. */
__device__ void finish_slice(const struct attend_args &a, struct shared *s, uint32_t slice) {
    const uint32_t d = a.pool.geometry.head_dim, lane = threadIdx.x % 32;
    const uint32_t step = s->job.bands, most = step * QUERIES;
    uint8_t *partial = s->job.partials + slice * s->job.partial_bytes;

    __syncthreads();
    for (uint32_t q = warp_index(); q < s->job.queries; q += WARPS) {
        const uint32_t w = q / QUERIES, in = q % QUERIES;
        float4 sum[2] = {};
        const struct lk_cuda_stat all = add_parts(
            d, WARPS / step,
            [&](uint32_t i) {
                const struct lk_cuda_stat v = s->stat[w + i * step][in];
                return make_float4(v.peak, v.mass, v.kept, 0.f);
            },
            [&](uint32_t i) { return warp_out(s, w + i * step, in, d); }, sum);
        if (s->job.slices == 1) {
            store_query(a, s, q, sum, all);
            continue;
        }
        for (int x = 0; x < 2; x++)
            if (128 * x + 4 * lane < d)
                __stcg((float4 *)(partial + (q * d + 128 * x + 4 * lane) * 4), sum[x]);
        if (lane == 0)
            __stcg((float4 *)(partial + most * d * 4) + q,
                   make_float4(all.peak, all.mass, all.kept, 0.f));
    }
    __syncthreads();
}

__device__ void merge_slices(const struct attend_args &a, struct shared *s) {
    const uint32_t d = a.pool.geometry.head_dim, most = s->job.bands * QUERIES;
    const uint8_t *first = s->job.partials;
    const uint64_t step = s->job.partial_bytes;

    for (uint32_t q = warp_index(); q < s->job.queries; q += WARPS) {
        float4 sum[2] = {};
        const struct lk_cuda_stat all = add_parts(
            d, s->job.slices,
            [&](uint32_t i) {
                return __ldcg((const float4 *)(first + i * step + most * d * 4) + q);
            },
            [&](uint32_t i) { return (const float *)(first + i * step) + q * d; }, sum);
        store_query(a, s, q, sum, all);
    }
    __syncthreads();
}

/* ---- a slice ---- */

__device__ void run_slice(const struct attend_args &a, struct shared *s, uint32_t slice) {
    const struct job &t = s->job;
    const uint32_t lane = threadIdx.x % 32, warp = warp_index(), d = a.pool.geometry.head_dim;
    const uint32_t shared_by = t.bands, parts = WARPS / shared_by;
    const uint32_t first_query = (warp % shared_by) * QUERIES;
    const uint32_t last = min(t.tiles, (slice + 1) * t.slice_tiles);
    const bool bf16 = a.pool.geometry.dtype == LK_BF16;

    for (uint32_t x = 0; x < QUERIES; x++) {
        const uint32_t own = first_query + x;
        const uint16_t *q = t.q + (uint64_t)query_index(a, t, own) * d;
        const int limit = query_limit(t, own);
        float o[CHANNELS], peak = -INFINITY, mass = 0, kept = 0;
#pragma unroll
        for (int i = 0; i < CHANNELS; i++)
            o[i] = 0;
        for (uint32_t half = 2 * (slice * t.slice_tiles + warp / shared_by);
             own < t.queries && half < 2 * last; half += half % 2 ? 2 * parts - 1 : 1) {
            const struct octet h = look_up(t, half / 2, last, half % 2);
            const int position = octet_position(t, h);
            const uint16_t *keys =
                (const uint16_t *)(a.pool.kv + octet_block(a, t, h) * a.pool.layout.head_bytes) +
                h.in * d;
            const uint16_t *values = keys + (d << t.token_shift);
            for (int i = 0; position != NEVER && i < 8 && position + i < limit; i++) {
                float z = 0;
                for (uint32_t ch = lane; ch < d; ch += 32)
                    z = fmaf(element(q[ch], bf16), element(keys[i * d + ch], bf16), z);
                z = warp_sum(z) * t.scale + h.bias;
                float top = fmaxf(peak, z), base = top == -INFINITY ? 0.f : top;
                float fade = shrink(peak, base), p = exp2_fast(z - base);
                mass = mass * fade + p;
                kept = kept * fade + (h.kept ? p : 0.f);
#pragma unroll
                for (int c = 0; c < CHANNELS; c++)
                    if (lane + 32 * c < d)
                        o[c] = fmaf(p, element(values[i * d + lane + 32 * c], bf16), o[c] * fade);
                peak = top;
            }
        }
        if (lane == 0)
            s->stat[warp][x] = {peak, mass, kept, 0.f};
#pragma unroll
        for (int c = 0; c < CHANNELS; c++)
            if (lane + 32 * c < d)
                warp_out(s, warp, x, d)[lane + 32 * c] = o[c];
    }
}

__global__ void __launch_bounds__(THREADS)
    attend_plain(const __grid_constant__ struct attend_args a) {
    SHARED_BYTES(memory, 16);
    struct shared *s = (struct shared *)memory;
    uint32_t task, last;

    let_next_start();
    const struct row_starts starts = load_starts(a.batch, LK_CUDA_ATTEND);
    wait_for_previous();
    note_time(a.clock, LK_CUDA_AT_ATTEND);
    find_tasks(a, &task, &last);
    for (bool any = false; task < last; any = true) {
        if (warp_index() == 0) {
            const struct job j = find_job(a, starts, &s->row, any, task);
            if (threadIdx.x == 0)
                s->job = j;
            load_found(j, &s->found);
            copy_wait<0>();
        }
        __syncthreads();
        const uint32_t begin = task - s->job.first, end = min(last - s->job.first, s->job.slices);
        if (begin == 0)
            list_all(s->job);
        for (uint32_t slice = begin; slice < end; slice++) {
            run_slice(a, s, slice);
            finish_slice(a, s, slice);
        }
        if (s->job.slices == 1 || all_done(s->job, end - begin, &s->last)) {
            if (s->job.slices > 1)
                merge_slices(a, s);
            if (threadIdx.x == 0)
                finish_head(a, s->job, &s->found, s->mass);
        }
        task += end - begin;
        __syncthreads();
    }
}

int lk_cuda_attend_plain(const struct lk_cuda_step *step, void *stream) {
    const struct attend_args a = {step->pool, step->batch, step->sync, step->clock};
    const uint32_t bytes = lk_cuda_attend_least(&step->pool.geometry);
    int error = take_bytes(attend_plain, bytes);

    return error ? error
                 : launch(attend_plain, dim3(2 * step->processors), THREADS, bytes, stream, a);
}

uint32_t lk_cuda_attend_least(const struct lk_geometry *g) {
    return sizeof(struct shared) + 4 * WARPS * QUERIES * (g->head_dim + 4);
}
