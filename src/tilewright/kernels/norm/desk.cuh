// How rows come to the threads of backward_wide.cu, and what these tell each other; with BULK dx goes out the same way.
//
// Of a block one thread fetches rows into a ring in shared memory, ahead of THREADS others; a warp tells the other
// blocks of a cluster the sums of this one.
//
// Defined by whoever compiles, and by backward_wide.cu before: its sizes, State, which is told, and Normal.
#pragma once
#include "shares.cuh"

struct Matrix {
    const ELEMENT *base;
    long long stride;  // elements from row to row
};

// In shared memory: what the threads of a block tell each other.
struct Desk {
    Arrival full[ROWS], empty[ROWS][PARTS];
    Arrival posted[SETS], heard[SETS], joined[SETS];
    State found[SETS][WARPS], told[SETS][SHARE], averages[SETS];
    Normal normals[ROWS];
    long long rows[ROWS];     // numbers of the rows in the ring
    Segment segments[PERIOD];  // of the program: it comes into every class once at most
    int count;
    uint4 inside[2];  // ones where the first and the last vector of a segment's rows are the row's
};

extern __shared__ __align__(128) uint4 ring[];  // [ROWS][INPUTS][COUNT], then the weights of the columns

// Vector v of those that the block has of a row.
__device__ __forceinline__ uint4 *in_ring(int row, int input, int v) {
    return ring + (row * INPUTS + input) * COUNT + v;
}
__device__ __forceinline__ WEIGHT *kept_weights(int v) {
    return reinterpret_cast<WEIGHT *>(in_ring(ROWS, 0, 0)) + v * LANES;
}

__device__ __forceinline__ void copy_bulk(uint4 *to, const void *from, int bytes, const Arrival &arrival) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(unsigned(__cvta_generic_to_shared(to))), "l"(from), "r"(bytes), "r"(arrival.address())
                 : "memory");
}

// Vectors of a row that this block has.
__device__ __forceinline__ int vectors_here(const Elements &shape, const Place &at) {
    return max(0, min(COUNT, shape.vectors - at.first));
}

// And back: until `await_reads` what is at `from` must stay.
__device__ __forceinline__ void store_bulk(ELEMENT *to, const uint4 *from, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 ::"l"(to), "r"(unsigned(__cvta_generic_to_shared(from))), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
__device__ __forceinline__ void await_reads() {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
// One thread: rows into the ring, as far ahead as there is room, and what is known of each; with BULK, dx out of it.
__device__ __forceinline__ void fetch(Desk &desk, const Matrix (&inputs)[INPUTS], ELEMENT *dx, const float *means,
                                      const float *rstds, int columns, const Share &share, const Place &at) {
    int slot = 0, count = 0;
    unsigned round = 0;
    long long turn = 0;
    const auto send = [&] {
        if (count > 0) store_bulk(dx + desk.rows[slot] * columns + at.first * LANES, in_ring(slot, 0, 0), count * 16);
    };
    for (int n = 0; n < desk.count; n++) {
        const Segment part = desk.segments[n];
        const Elements shape(inputs[0].base + part.row * inputs[0].stride, columns);
        const Order order = share.order_of(part);
        count = vectors_here(shape, at);
        for (int i = 0; i < part.turns; i++) {
            const long long row = order.row_of(turn + i);
            // Not ahead of their turn, which takes 7 % at 5000 columns of bf16, 1 % at 50257.
            const Normal normal{CENTERED ? __ldg(means + row) : 0.f, __ldg(rstds + row)};
            for (int k = 0; k < PARTS; k++) {
                if (round > 0) {
                    desk.empty[slot][k].wait_here(round - 1);
                    if (BULK) send(), await_reads();
                }
                if (k == 0) {
                    desk.normals[slot] = normal, desk.rows[slot] = row;
                    desk.full[slot].expect(INPUTS * count * 16);
                }
                const int vectors = min(PART, count - k * PART);
#pragma unroll
                for (int n = 0; n < INPUTS; n++)
                    if (vectors > 0)
                        copy_bulk(in_ring(slot, n, k * PART),
                                  inputs[n].base + row * inputs[n].stride + shape.column(at.first + k * PART),
                                  vectors * 16, desk.full[slot]);
            }
            if (++slot == ROWS) slot = 0, round++;
        }
        turn += part.turns;
    }
    if (!BULK) return;
    // The rows that are still in the ring.
    const int rows = min(share.turns(), ROWS);
    slot = (share.turns() - rows) % ROWS, round = (share.turns() - rows) / ROWS;
    for (int i = 0; i < rows; i++) {
        desk.empty[slot][0].wait_here(round);
        send();
        if (++slot == ROWS) slot = 0, round++;
    }
    await_reads();
}

// One warp: the sums of each row from the block's warps, then from the cluster's blocks; averages for this block's.
__device__ __forceinline__ void tell(Desk &desk, int turns, int columns, const Place &at) {
    const int lane = threadIdx.x % 32;
    constexpr int width = WARPS > 16 ? 32 : 16;
    constexpr int together = SHARE > 8 ? 16 : SHARE > 4 ? 8 : SHARE > 2 ? 4 : 2;
    for (int i = 0; i < turns; i++) {
        const int set = i % SETS;
        desk.posted[set].wait_here(i / SETS);
        State state = across_lanes<width>(lane < WARPS ? desk.found[set][lane] : State::none());
        if (lane == 0) desk.heard[set].expect(sizeof(desk.told[0]));
        if (lane < SHARE) send(&desk.told[set][at.block], state, desk.heard[set], lane);
        desk.heard[set].wait(i / SETS);
        state = across_lanes<together>(lane < SHARE ? desk.told[set][lane] : State::none());
        if (lane == 0) desk.averages[set] = state.over(columns), desk.joined[set].arrive();
    }
}

__device__ __forceinline__ void post(Desk &desk, State state, int number) {
    state = across_lanes<32>(state);
    if (threadIdx.x % 32 == 0) {
        desk.found[number % SETS][threadIdx.x / 32] = state;
        desk.posted[number % SETS].arrive();
    }
}
// Averages over the row.
__device__ __forceinline__ State collect(const Desk &desk, int number, int columns) {
    const int set = number % SETS;
    if constexpr (SHARE > 1) {
        desk.joined[set].wait_here(number / SETS);
        return desk.averages[set];
    } else {
        constexpr int width = WARPS > 16 ? 32 : WARPS > 8 ? 16 : WARPS > 4 ? 8 : WARPS > 2 ? 4 : WARPS > 1 ? 2 : 1;
        desk.posted[set].wait_here(number / SETS);
        const int lane = threadIdx.x % width;
        return across_lanes<width>(lane < WARPS ? desk.found[set][lane] : State::none()).over(columns);
    }
}
