// Reductions over the threads of a row that go on meanwhile: by shared memory within a block, by stores into the
// other blocks' shared memory within a cluster.
//
// Macros: THREADS (of a block), ROW_THREADS (of it, that share a row: all, or 32 or fewer), CLUSTER (blocks that share
// a row), BLOCKS (of a multiprocessor), LAG (1 where a row's states are collected after the next row's are posted).
#pragma once
#include "row.cuh"

// The states of a row's threads, posted in one pass and collected in the next.
//
// A warp may post number n + 2 once number n is complete, while another still reads number n - 1: hence four sets
// of slots with a lag, two without.
template <class State>
struct ClusterReduce {
    static constexpr int warps = THREADS / 32, sets = LAG ? 4 : 2;
    State slots[sets][CLUSTER * warps];
    Barrier barriers[sets];

    // By all threads of a program, before the first post().
    __device__ __forceinline__ void start() {
        if (threadIdx.x == 0)
            for (int i = 0; i < sets; i++) barriers[i].init(CLUSTER > 1 ? 1 : warps);
        sync();
    }
    // All threads of a program: no block may end while another writes to it.
    static __device__ __forceinline__ void sync() {
        if constexpr (CLUSTER > 1)
            asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
        else
            __syncthreads();
    }
    // This thread's state of row number `number`; afterwards `state` is its warp's (within a warp: the row's).
    __device__ __forceinline__ void post(State &state, int number) {
        state = reduce_lanes<(ROW_THREADS < 32 ? ROW_THREADS : 32)>(state);
        if constexpr (ROW_THREADS > 32) {
            const int set = number % sets, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
            if constexpr (CLUSTER == 1) {
                if (lane == 0) slots[set][warp] = state, barriers[set].arrive();
            } else {
                if (threadIdx.x == 0) barriers[set].expect(sizeof(slots[0]));
                if (lane < CLUSTER) send(&slots[set][cluster_rank() * warps + warp], state, barriers[set], lane);
            }
        }
    }
    // The states that all threads posted for row number `number`, combined; `own` is what post() left in `state`.
    __device__ __forceinline__ State collect(State own, int number) const {
        if constexpr (ROW_THREADS > 32) {
            constexpr int count = CLUSTER * warps;
            const State *here = slots[number % sets];
            barriers[number % sets].wait(number / sets);
            constexpr int width = count > 16 ? 32 : count > 8 ? 16 : count > 4 ? 8 : count > 2 ? 4 : 2;
            own = State::identity();
#pragma unroll
            for (int i = threadIdx.x % width; i < (count + width - 1) / width * width; i += width)
                if (count % width == 0 || i < count) own.combine(here[i]);
            own = reduce_lanes<width>(own);
        }
        return own;
    }
};
