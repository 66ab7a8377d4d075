// Rows that pass through a ring in shared memory while programs stay: for long rows, and for sums over rows.
//
// A program (a block, or a cluster that shares a row) walks rows program * ROWS_PER_BLOCK, + programs * ROWS_PER_BLOCK,
// ... Every thread fetches the vectors that it will use itself (cp.async), STAGES vectors ahead, so no thread waits for
// another's data. A row stays in the ring from the first of PASSES passes over it, all but the last of which take sums,
// to the last, which writes. With LAG 1 each pass is one row behind the one before, so that a reduction has a whole
// row's time and nothing in the loop waits for all threads. Rows are whole vectors (ALIGNED): a thread owns the same
// columns of every row.
//
// Macros: those of cluster_reduce.cuh; ELEMENT (float, bf16, fp16), VECTORS (of a row, a thread), STAGES. By the
// including file: INPUTS (matrices read), PASSES.
#pragma once
#include "cluster_reduce.cuh"

using Elements = Row<ELEMENT, ALIGNED>;
constexpr int ROWS_PER_BLOCK = THREADS / ROW_THREADS, STEP = CLUSTER * ROW_THREADS;
constexpr int PASS_DISTANCE = (PASSES - 1) * LAG * VECTORS;  // vectors between the first pass and the last
static_assert(STAGES >= PASS_DISTANCE + VECTORS, "the rows between the passes fill the ring");
static_assert(ROW_THREADS <= 32 || ROW_THREADS == THREADS, "warps of several rows do not speak to each other");

struct Matrix {
    ELEMENT *base;
    long long stride;  // elements from row to row
};

// The rows and vectors of a thread.
struct ThreadRows {
    int first;            // number of its first vector of a row; STEP to the next
    int program, programs;
    long long row, step;  // its first row, and from row to row
    int rows, iterations;      // that it has; that any thread of its program has

    __device__ __forceinline__ ThreadRows(long long all) {
        first = (CLUSTER > 1 ? cluster_rank() : 0) * ROW_THREADS + threadIdx.x % ROW_THREADS;
        program = blockIdx.x / CLUSTER, programs = gridDim.x / CLUSTER;
        step = (long long)programs * ROWS_PER_BLOCK;
        const long long begin = (long long)program * ROWS_PER_BLOCK;
        row = begin + threadIdx.x / ROW_THREADS;
        rows = row < all ? int((all - row + step - 1) / step) : 0;
        iterations = begin < all ? int((all - begin + step - 1) / step) : 0;
    }
};

extern __shared__ __align__(128) char shared_bytes[];
constexpr int RING_BYTES = STAGES * INPUTS * THREADS * 16;  // shared memory behind them is the including file's

// This thread's vector of an input.
__device__ __forceinline__ uint4 &slot_vector(int slot, int input) {
    return reinterpret_cast<uint4 *>(shared_bytes)[(slot * INPUTS + input) * THREADS + threadIdx.x];
}

struct Ring {
    const ELEMENT *from[INPUTS];  // lane 0 of this thread's first vector, in the row that is fetched next
    long long step[INPUTS];       // elements from row to row
    int read_slot = 0, write_slot = 0, rows_left;  // slots of the first and the last pass; rows not yet fetched

    // Starts the loads that fill the ring.
    __device__ __forceinline__ Ring(const Matrix (&inputs)[INPUTS], const Elements &shape, const ThreadRows &at)
        : rows_left(at.rows) {
#pragma unroll
        for (int n = 0; n < INPUTS; n++) {
            step[n] = at.step * inputs[n].stride;
            from[n] = inputs[n].base + at.row * inputs[n].stride + shape.column(at.first);
        }
#pragma unroll
        for (int p = 0; p < STAGES; p++) fetch(p, p % VECTORS, shape, at);
    }
    // Loads vector i of the next row, all inputs; i cycles through 0, 1, ..., VECTORS - 1.
    __device__ __forceinline__ void fetch(int slot, int i, const Elements &shape, const ThreadRows &at) {
        if (rows_left > 0 && shape.holds(at.first + i * STEP)) {
#pragma unroll
            for (int n = 0; n < INPUTS; n++)
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                             ::"r"(unsigned(__cvta_generic_to_shared(&slot_vector(slot, n)))),
                             "l"(from[n] + i * STEP * lanes<ELEMENT>) : "memory");
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
        if (i == VECTORS - 1) {
            rows_left--;
#pragma unroll
            for (int n = 0; n < INPUTS; n++) from[n] += step[n];
        }
    }
    // Until vector I of the row of the first pass has arrived.
    template <int I>
    __device__ __forceinline__ void wait() const {
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - PASS_DISTANCE - I - 1) : "memory");
    }
    __device__ __forceinline__ static int next_slot(int slot) { return slot == STAGES - 1 ? 0 : slot + 1; }
    // Reuses the slot of vector i of the row of the last pass for the vector STAGES later.
    __device__ __forceinline__ void release(int i, const Elements &shape, const ThreadRows &at) {
        fetch(write_slot, (i + STAGES) % VECTORS, shape, at);
        write_slot = next_slot(write_slot);
    }
};
