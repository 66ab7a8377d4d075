// out[n, r, j] = sum of source[n, r, k] over the k with index[r, k] = j, in fp32 and the same at every run.
//
// Macros: ELEMENT (float, bf16, fp16), INDEX (int, long long), GROUP (values of n that share a pass over the index),
// ACROSS (0: source lies along k; 1: along r, and vectors of its 16 bytes begin at every eighth r).
//
// A warp owns one r and GROUP values of n; its sums are in shared memory. Of 32 elements at a time it adds those with
// equal indices, in a tree that the indices alone decide; then one lane adds each result to its sum, without atomics.
//
// Limit: memory, as long as few of 32 indices are equal; the worst case, 32 equal ones, takes five steps of the tree.
#include "row.cuh"

#ifndef __CUDACC_RTC__  // NVRTC knows it
extern "C" __device__ void __assertfail(const char *, const char *, unsigned, const char *, unsigned long);
#endif

constexpr int WARPS = 8;
constexpr int AHEAD = ACROSS ? 2 : 4;  // passes of 32 places whose loads are in flight
constexpr int WIDTH = 32 * AHEAD;
constexpr unsigned ALL = 0xffffffffu;
constexpr int PER_VECTOR = lanes<ELEMENT>, VECTORS_OF_ROWS = WARPS / PER_VECTOR;
constexpr int VECTORS = (GROUP * WIDTH * VECTORS_OF_ROWS + 32 * WARPS - 1) / (32 * WARPS);  // of a tile, for a thread

// Adds the values of lanes with equal keys into the first of these lanes; returns whether this lane is such a first.
__device__ __forceinline__ bool add_equal(int key, float (&value)[GROUP], int lane) {
    const unsigned peers = __match_any_sync(ALL, key);
    int rank = __popc(peers & ((1u << lane) - 1u));
    const bool leads = rank == 0;
    unsigned rest = peers & (0xfffffffeu << lane);
    while (__any_sync(ALL, rest)) {
        const int next = __ffs(rest);
#pragma unroll
        for (int g = 0; g < GROUP; g++) {
            const float other = __shfl_sync(ALL, value[g], (next - 1) & 31);
            if (next) value[g] += other;
        }
        // Lanes of odd rank were added to the lane before them and drop out.
        rest &= ~__ballot_sync(ALL, rank & 1);
        rank >>= 1;
    }
    return leads;
}

// source [heads, rows, columns] and index [rows, columns] of any strides, in elements; out [heads, rows, extent] dense.
// Blocks: x of WARPS rows, y of GROUP heads. Shared memory: [WARPS, GROUP, extent] sums, then the tile of ACROSS.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    scatter_sums(const ELEMENT *__restrict__ source, const INDEX *__restrict__ index, ELEMENT *__restrict__ out,
                 int heads, int rows, int columns, int extent, long long head_stride, long long row_stride,
                 long long column_stride, long long index_row, long long index_column) {
    extern __shared__ float sums[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row = blockIdx.x * WARPS + warp, first = blockIdx.y * GROUP;
    const bool is_row = row < rows;
    float *mine = sums + warp * GROUP * extent;
    ELEMENT *tile = (ELEMENT *)(sums + WARPS * GROUP * extent);  // ACROSS: [GROUP, WARPS, WIDTH]
    for (int j = lane; j < GROUP * extent; j += 32) mine[j] = 0.f;

    // Vector v of a tile: rows of place v / (GROUP · WIDTH), head v / WIDTH % GROUP, column v % WIDTH.
    const auto vector_at = [&](int v, int start) {
        const int head = first + v / WIDTH % GROUP, column = start + v % WIDTH;
        const long long begin = (long long)blockIdx.x * WARPS + v / (GROUP * WIDTH) * PER_VECTOR;
        if (v >= GROUP * WIDTH * VECTORS_OF_ROWS || head >= heads || column >= columns || begin >= rows)
            return make_uint4(0, 0, 0, 0);
        return *(const uint4 *)(source + head * head_stride + begin + column * column_stride);
    };
    uint4 coming[VECTORS];
    if constexpr (ACROSS) {
#pragma unroll
        for (int i = 0; i < VECTORS; i++) coming[i] = vector_at(threadIdx.x + i * 32 * WARPS, 0);
    }
    bool is_wrong = false;
    for (int start = 0; start < columns; start += WIDTH) {
        if constexpr (ACROSS) {
            __syncthreads();
#pragma unroll
            for (int i = 0; i < VECTORS; i++) {
                const int v = threadIdx.x + i * 32 * WARPS;
                const int head = v / WIDTH % GROUP, from = v / (GROUP * WIDTH) * PER_VECTOR;
                if (v < GROUP * WIDTH * VECTORS_OF_ROWS) {
                    const ELEMENT *elements = (const ELEMENT *)&coming[i];
#pragma unroll
                    for (int e = 0; e < PER_VECTOR; e++)
                        tile[(head * WARPS + from + e) * WIDTH + v % WIDTH] = elements[e];
                }
                coming[i] = vector_at(v, start + WIDTH);
            }
            __syncthreads();
        }
        int key[AHEAD];
        float value[AHEAD][GROUP];
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
            const int column = start + a * 32 + lane;
            const bool is_inside = is_row && column < columns;
            const long long place = is_inside ? (long long)index[row * index_row + column * index_column] : 0;
            const bool is_place = place >= 0 && place < extent;
            is_wrong |= !is_place;
            key[a] = is_inside && is_place ? int(place) : ~lane;
#pragma unroll
            for (int g = 0; g < GROUP; g++) {
                value[a][g] = 0.f;
                if constexpr (ACROSS) {
                    value[a][g] = widen(tile[(g * WARPS + warp) * WIDTH + a * 32 + lane]);
                } else if (is_inside && first + g < heads) {
                    value[a][g] = widen(source[(first + g) * head_stride + row * row_stride + column * column_stride]);
                }
            }
        }
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
            __syncwarp();
            if (add_equal(key[a], value[a], lane) && key[a] >= 0) {
#pragma unroll
                for (int g = 0; g < GROUP; g++) mine[g * extent + key[a]] += value[a][g];
            }
        }
    }
    __syncwarp();
    if (is_wrong) __assertfail("index out of bounds", "scatter.cu", 0, "scatter_sums", 1);
    if (!is_row) return;
    for (int g = 0; g < GROUP && first + g < heads; g++) {
        ELEMENT *to = out + ((long long)(first + g) * rows + row) * extent;
        for (int j = lane; j < extent; j += 32) narrow(to[j], mine[g * extent + j]);
    }
}
