// Rows that pass through shared memory while programs stay: for long rows, and for sums over rows.
//
// A program is a thread block, or a cluster of them that shares a row; it walks rows number program * GROUPS,
// + programs * GROUPS, ... Every thread fetches the vectors that it is going to use itself (cp.async), DEPTH vectors
// ahead, so no thread waits for another's data; a row's vectors stay in the ring from the first of PASSES passes over
// them, all but the last of which take sums, to the last, which writes. With LAG 1 each pass is one row behind the one
// before, and what the warps and blocks of a row tell each other has a whole row's time to arrive: nothing in the loop
// waits for all.
//
// Programs step by a number of rows after which rows begin at the same place within LINE bytes again, so a thread
// owns the same columns of every row.
//
// Defined by whoever compiles: ELEMENT (float, bf16, fp16), EDGES (WHOLE or RAGGED) and LINE as in row.cuh, THREADS
// (a block), WIDTH (threads of it that share a row; the block, or 32 or fewer), VECTORS (of a row, a thread), CLUSTER,
// BLOCKS (a multiprocessor), DEPTH (vectors of a thread in the ring), LAG. By the including file: INPUTS (matrices
// read), PASSES.
#pragma once
#include "mail.cuh"

using Elements = Row<ELEMENT, EDGES>;
constexpr int GROUPS = THREADS / WIDTH, STEP = CLUSTER * WIDTH;
constexpr int BEHIND = (PASSES - 1) * LAG * VECTORS;  // vectors between the first pass and the last
static_assert(DEPTH >= BEHIND + VECTORS, "the rows between the passes fill the ring");
static_assert(WIDTH <= 32 || WIDTH == THREADS, "warps of several rows do not speak to each other");

struct Matrix {
    ELEMENT *base;
    long long stride;  // elements from row to row
};

// The rows and vectors of a thread.
struct Place {
    int first;            // its first vector of a row; from one to the next, STEP
    int program, programs;
    long long row, step;  // its first row, and from row to row
    int rows, turns;      // that it has; that its program has at most
    bool edged = false;   // whether a vector of it is only partly the row's

    __device__ __forceinline__ Place(long long all) {
        first = (CLUSTER > 1 ? cluster_rank() : 0) * WIDTH + threadIdx.x % WIDTH;
        program = blockIdx.x / CLUSTER, programs = gridDim.x / CLUSTER;
        step = (long long)programs * GROUPS;
        const long long begin = (long long)program * GROUPS;
        row = begin + threadIdx.x / WIDTH;
        rows = row < all ? int((all - row + step - 1) / step) : 0;
        turns = begin < all ? int((all - begin + step - 1) / step) : 0;
    }
    // In rows that lie as `shape`. Few threads are.
    __device__ __forceinline__ void find_edges(const Elements &shape) {
        for (int i = 0; i < VECTORS; i++)
            if (shape.holds(first + i * STEP) && shape.edge(first + i * STEP)) edged = true;
    }
};

extern __shared__ __align__(128) char shared_bytes[];
constexpr int RING_BYTES = DEPTH * INPUTS * THREADS * 16;  // of these; what comes behind is the including file's

// This thread's vector of an input.
__device__ __forceinline__ uint4 &in_slot(int slot, int input) {
    return reinterpret_cast<uint4 *>(shared_bytes)[(slot * INPUTS + input) * THREADS + threadIdx.x];
}

struct Ring {
    const ELEMENT *from[INPUTS];  // lane 0 of this thread's first vector, in the row that is fetched next
    long long step[INPUTS];       // elements from row to row
    int taken = 0, given = 0, left;  // slots of the first and the last pass; rows not yet fetched

    // Fills the ring.
    __device__ __forceinline__ Ring(const Matrix (&inputs)[INPUTS], const Elements &shape, const Place &at)
        : left(at.rows) {
#pragma unroll
        for (int n = 0; n < INPUTS; n++) {
            step[n] = at.step * inputs[n].stride;
            from[n] = inputs[n].base + at.row * inputs[n].stride + shape.column(at.first);
        }
#pragma unroll
        for (int p = 0; p < DEPTH; p++) fetch(p, p % VECTORS, shape, at);
    }
    // Vector i of the next row, all inputs; i goes round 0, 1, ..., VECTORS - 1.
    __device__ __forceinline__ void fetch(int slot, int i, const Elements &shape, const Place &at) {
        if (left > 0 && shape.holds(at.first + i * STEP)) {
#pragma unroll
            for (int n = 0; n < INPUTS; n++)
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                             ::"r"(unsigned(__cvta_generic_to_shared(&in_slot(slot, n)))),
                             "l"(from[n] + i * STEP * lanes<ELEMENT>) : "memory");
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
        if (i == VECTORS - 1) {
            left--;
#pragma unroll
            for (int n = 0; n < INPUTS; n++) from[n] += step[n];
        }
    }
    // Until vector i of the row of the first pass is there.
    template <int I>
    __device__ __forceinline__ void wait() const {
        asm volatile("cp.async.wait_group %0;" ::"n"(DEPTH - BEHIND - I - 1) : "memory");
    }
    __device__ __forceinline__ static int after(int slot) { return slot == DEPTH - 1 ? 0 : slot + 1; }
    // Vector i of the row of the last pass is done with: its slot takes the vector DEPTH later.
    __device__ __forceinline__ void give_back(int i, const Elements &shape, const Place &at) {
        fetch(given, (i + DEPTH) % VECTORS, shape, at);
        given = after(given);
    }
};
