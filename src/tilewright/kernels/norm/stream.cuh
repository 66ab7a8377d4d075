// Rows streamed through shared memory, for kernels that see each row once: layer norm, RMS norm, their gradients.
//
// One program is a thread block, or a cluster of them that shares a row; programs stay on their multiprocessors
// and walk the rows in steps. A block keeps a ring of slots full with bulk copies (cp.async.bulk), so that memory is
// busy while its warps reduce the row at hand; its first warp issues them between its own work, for a warp that did
// nothing else would cost the others a fifth of their registers.
//
//   tile       GROUPS rows, each held by LANES threads of a block; GROUPS is 1 where a row takes the whole block
//   vector     16 bytes aligned in memory. A row's first and last vector may hold elements of its neighbours
//              (RAGGED): those count as absent. Vector v of a row belongs to thread v % LANES, always
//   head       elements of the first vector that lie before the row. Programs step by a number of rows that is
//              a multiple of 16 bytes, so each thread meets one head only, and the columns that it owns, their
//              weights and their partial sums stay the same from row to row
//   slot       a chunk of a tile: CHUNK_VECTORS vectors a thread of each input (all of the tile if GROUPS > 1)
//
// Set by the build: ELEMENT (0 fp32, 1 bf16, 2 fp16), WEIGHT (the same, of weight and bias), HAS_WEIGHT, HAS_BIAS,
// CENTERED (1 layer norm, 0 RMS norm), RESIDUAL, RAGGED, LANES, GROUPS, VECTORS (of a row, a thread),
// CHUNK_VECTORS, CLUSTER, BLOCKS (a multiprocessor), HEADS (that the rows of a tile have), DEPTH (slots),
// SHARED_BYTES. Set by the including file: INPUTS (matrices read), KEEPS_BIAS (whether the bias is read), STREAMED
// (0 if it uses no ring, and weights stay where they are).

#include "numbers.cuh"

constexpr int THREADS = LANES * GROUPS;
constexpr int WARPS = THREADS / 32;
constexpr int OWNED = VECTORS * VEC;
constexpr int SLICE = LANES * OWNED;
constexpr int CHUNKS = GROUPS > 1 ? 1 : VECTORS / CHUNK_VECTORS;
constexpr int EACH = VECTORS / CHUNKS;
static_assert(THREADS % 32 == 0 && (CLUSTER == 1 || GROUPS == 1) && VECTORS % CHUNK_VECTORS == 0, "geometry");

// ---- Barriers in shared memory

__device__ u32 shared(const void* at) { return static_cast<u32>(__cvta_generic_to_shared(at)); }

__device__ void barrier_init(u64* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared(barrier)), "r"(arrivals) : "memory");
}

__device__ void barrier_expect(u64* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared(barrier)), "r"(bytes)
                 : "memory");
}

__device__ void barrier_arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared(barrier)) : "memory");
}

// Until the phase of that parity is over.
__device__ void barrier_wait(u64* barrier, u32 parity) {
    asm volatile(
        "{ .reg .pred done;\n"
        "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again; }" ::"r"(shared(barrier)), "r"(parity) : "memory");
}

__device__ void copy_bulk(char* to, const char* from, u32 bytes, u64* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared(to)), "l"(from), "r"(bytes), "r"(shared(barrier)) : "memory");
}

// Threads of one row; nothing to do within a warp.
__device__ void row_barrier() {
    if (LANES > 32) asm volatile("bar.sync %0, %1;" ::"r"(1 + (int)threadIdx.x / LANES), "n"(LANES) : "memory");
}

__device__ void cluster_barrier() {
    if (CLUSTER > 1)
        asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
    else
        __syncthreads();
}

// ---- A matrix in memory, and the part of it that a thread owns

struct Matrix {
    char* base;
    i64 pitch; // bytes from row to row
    __device__ char* row(i64 index) const { return base + index * pitch; }
};

struct Place {
    int lane, group, rank, program, programs;
    i64 rows;
    int columns, head;
    int first, count; // this block's vectors of a row
    bool edged; // whether this thread holds a vector that is only partly the row's: two threads do
    // Column of element 0 of this thread's vector k; a row's first vector may begin before column 0.
    __device__ int column(int k) const { return (first + k * LANES + lane) * VEC - head; }
    __device__ bool holds(int k) const { return k * LANES + lane < count; }
    // The first row of a program's first tile, and from tile to tile.
    __device__ i64 begin() const { return (i64)program * GROUPS; }
    __device__ i64 step() const { return (i64)programs * GROUPS; }
    __device__ bool whole(int column) const { return column >= 0 && column + VEC <= columns; }
    __device__ bool inside(int column) const { return column >= 0 && column < columns; }
};

__device__ int head_of(const Matrix& x, i64 row) { return RAGGED ? (int)((u64)x.row(row) & 15) / SIZE : 0; }

__device__ Place place_of(const Matrix& x, i64 rows, int columns) {
    Place at;
    at.lane = threadIdx.x % LANES;
    at.group = threadIdx.x / LANES;
    at.rank = blockIdx.x % CLUSTER;
    at.program = blockIdx.x / CLUSTER;
    at.programs = gridDim.x / CLUSTER;
    at.rows = rows;
    at.columns = columns;
    at.head = head_of(x, at.begin() + at.group);
    int vectors = (at.head + columns + VEC - 1) / VEC, share = (vectors + CLUSTER - 1) / CLUSTER;
    at.first = at.rank * share;
    at.count = max(0, min(share, vectors - at.first));
    at.edged = false;
    for (int k = 0; k < VECTORS; k++)
        if (RAGGED && at.holds(k) && !at.whole(at.column(k))) at.edged = true;
    return at;
}

// ---- A block's shared memory: barriers, what its warps and its peers hand over, the weights, the ring

constexpr int INPUT_BYTES = GROUPS > 1 ? THREADS * VECTORS * 16 + 16 : LANES * CHUNK_VECTORS * 16; // in a slot
constexpr int ROW_BYTES = LANES * VECTORS * 16; // from row to row of a tile whose rows are not side by side
constexpr int SLOT_BYTES = INPUTS * INPUT_BYTES;
constexpr int COPY_BYTES = SLICE * WEIGHT_SIZE;

struct Memory {
    u64 full[DEPTH], empty[DEPTH], arrived[2];
    float2 partial[2][WARPS]; // two, in turn: a warp may be one sum ahead of another
    float2 inbox[2][CLUSTER];
    alignas(128) char weight[STREAMED && HAS_WEIGHT ? HEADS * COPY_BYTES : 16];
    alignas(128) char bias[STREAMED && KEEPS_BIAS ? HEADS * COPY_BYTES : 16];
    alignas(128) char slots[DEPTH][INPUTS][STREAMED ? INPUT_BYTES : 16];
};

static_assert(sizeof(Memory) <= (SHARED_BYTES + 127) / 128 * 128, "geometry.py counts these bytes too");
extern __shared__ __align__(128) char shared_bytes[];
#define memory (*reinterpret_cast<Memory*>(shared_bytes))

__device__ void open_memory() {
    if (threadIdx.x == 0) {
        for (int i = 0; i < DEPTH; i++) barrier_init(memory.full + i, 1), barrier_init(memory.empty + i, WARPS);
        for (int i = 0; i < 2; i++) barrier_init(memory.arrived + i, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
}

// One copy of the weights for each head that the groups meet, shifted to where that group needs them.
__device__ void load_weights(const void* from, char* to, const Matrix& x, const Place& at) {
    for (int i = threadIdx.x; i < HEADS * SLICE; i += blockDim.x) {
        int column = at.first * VEC + i % SLICE - head_of(x, at.begin() + i / SLICE);
        write_one<WEIGHT>(to + i * WEIGHT_SIZE, at.inside(column) ? read_one<WEIGHT>(from, column) : 0.f);
    }
}

__device__ void weight_vector(const char* from, int k, const Place& at, float* to) {
    read<WEIGHT, VEC>(from + at.group % HEADS * COPY_BYTES + (k * LANES + at.lane) * VEC * WEIGHT_SIZE, to);
}

// ---- The ring

struct Ring {
    int slot = 0;
    u32 phase = 0;
    __device__ void step() {
        if (++slot == DEPTH) slot = 0, phase ^= 1;
    }
    __device__ void wait_full() const { barrier_wait(memory.full + slot, phase); }
    __device__ void wait_empty() const { barrier_wait(memory.empty + slot, phase ^ 1); }
    __device__ void release() const {
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(memory.empty + slot);
    }
    __device__ void copy(int input, int offset, const char* from, u32 bytes) const {
        copy_bulk(memory.slots[slot][input] + offset, from, bytes, memory.full + slot);
    }
};

// Whether the rows of a tile lie side by side in every input, so that one copy brings them all.
__device__ bool side_by_side(const Matrix* inputs, const Place& at) {
    bool all = true;
    for (int i = 0; i < INPUTS; i++) all = all && inputs[i].pitch == at.columns * (i64)SIZE;
    return all;
}

// Where a group's row begins in its slot, in bytes.
__device__ int offset_in_slot(const Matrix* inputs, const Place& at) {
    if (GROUPS == 1) return 0;
    if (!side_by_side(inputs, at)) return at.group * ROW_BYTES;
    return (head_of(inputs[0], at.begin()) + at.group * at.columns) / VEC * 16;
}

__device__ u32 whole_vectors(int elements) { return (elements * SIZE + 15) / 16 * 16; }

// What keeps the ring full: every chunk of every tile of this program, in the order in which they are consumed.
struct Feed {
    Ring ring;
    i64 row; // the next chunk's
    int begin = 0; // its first vector
    bool together;

    __device__ Feed(const Matrix* inputs, const Place& at) : row(at.begin()), together(side_by_side(inputs, at)) {
        for (int i = 0; i < DEPTH; i++) next(inputs, at);
    }

    // Fills one slot once all warps have given it back. Does nothing in warps other than the first.
    __device__ void next(const Matrix* inputs, const Place& at) {
        if (threadIdx.x >= 32 || row >= at.rows) return;
        if (GROUPS > 1) {
            tile(inputs, at);
            row += at.step();
        } else {
            chunk(inputs, at);
            begin += CHUNK_VECTORS * LANES;
            if (begin >= at.count) begin = 0, row += at.step();
        }
        ring.step();
    }

    // A chunk of a row that has the block to itself.
    __device__ void chunk(const Matrix* inputs, const Place& at) const {
        if (threadIdx.x) return;
        u32 bytes = min(CHUNK_VECTORS * LANES, at.count - begin) * 16;
        i64 offset = (at.first + begin) * 16ll - at.head * SIZE;
        ring.wait_empty();
        barrier_expect(memory.full + ring.slot, INPUTS * bytes);
#pragma unroll
        for (int i = 0; i < INPUTS; i++) ring.copy(i, 0, inputs[i].row(row) + offset, bytes);
    }

    // A tile of several rows: one copy, or one a row.
    __device__ void tile(const Matrix* inputs, const Place& at) const {
        int lane = threadIdx.x, rows = (int)min((i64)GROUPS, at.rows - row), head = head_of(inputs[0], row);
        u32 bytes = together ? (lane ? 0 : whole_vectors(head + rows * at.columns)) : 0;
        if (!together)
            for (int r = lane; r < rows; r += 32) bytes += whole_vectors(head_of(inputs[0], row + r) + at.columns);
        u32 all = __reduce_add_sync(~0u, bytes);
        if (lane == 0) {
            ring.wait_empty();
            barrier_expect(memory.full + ring.slot, INPUTS * all);
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < INPUTS; i++) {
            if (together && lane == 0) ring.copy(i, 0, inputs[i].row(row) - head * SIZE, bytes);
            if (together) continue;
            for (int r = lane; r < rows; r += 32) {
                int own = head_of(inputs[0], row + r);
                ring.copy(i, r * ROW_BYTES, inputs[i].row(row + r) - own * SIZE, whole_vectors(own + at.columns));
            }
        }
    }
};

// ---- Sums over a row

struct Reducer {
    int turn = 0, exchanges = 0;

    // Over the threads of a row in this block; every one of them gets the result. For all sums the order is fixed.
    __device__ float2 row_sum(float2 value) {
#pragma unroll
        for (int step = (LANES < 32 ? LANES : 32) / 2; step; step /= 2) {
            value.x += __shfl_xor_sync(~0u, value.x, step);
            value.y += __shfl_xor_sync(~0u, value.y, step);
        }
        if constexpr (LANES > 32) {
            if (threadIdx.x % 32 == 0) memory.partial[turn][threadIdx.x / 32] = value;
            row_barrier();
            const float2* parts = memory.partial[turn] + threadIdx.x / LANES * (LANES / 32);
            value = parts[0];
#pragma unroll
            for (int i = 1; i < LANES / 32; i++) value.x += parts[i].x, value.y += parts[i].y;
            turn ^= 1;
        }
        return value;
    }

    // `mine` of the cluster's block number threadIdx.x % CLUSTER: in a warp, every CLUSTER neighbours hold all.
    __device__ float2 exchange(float2 mine, int rank) {
        int side = exchanges & 1;
        if (threadIdx.x == 0) barrier_expect(memory.arrived + side, CLUSTER * sizeof(float2));
        if (threadIdx.x < CLUSTER) {
            u32 slot, barrier;
            asm("mapa.shared::cluster.u32 %0, %1, %2;"
                : "=r"(slot) : "r"(shared(&memory.inbox[side][rank])), "r"(threadIdx.x));
            asm("mapa.shared::cluster.u32 %0, %1, %2;"
                : "=r"(barrier) : "r"(shared(memory.arrived + side)), "r"(threadIdx.x));
            u64 both = (u64)__float_as_uint(mine.y) << 32 | __float_as_uint(mine.x);
            asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(slot),
                         "l"(both), "r"(barrier) : "memory");
        }
        barrier_wait(memory.arrived + side, (exchanges >> 1) & 1);
        exchanges++;
        return memory.inbox[side][threadIdx.x % CLUSTER];
    }

    // Sum over the blocks of a cluster of what `exchange` gave.
    static __device__ float cluster_sum(float value) {
#pragma unroll
        for (int step = CLUSTER / 2; step; step /= 2) value += __shfl_xor_sync(~0u, value, step);
        return value;
    }
};

// Of a thread's vector, the elements that are not its row's become `fill`. Few threads have any, so the others
// pass by at one test.
__device__ void mask_vector(float* values, int k, const Place& at, float fill) {
    if (!RAGGED || !at.edged) return;
    int column = at.column(k);
#pragma unroll
    for (int e = 0; e < VEC; e++)
        if (!at.inside(column + e)) values[e] = fill;
}

// A vector of this thread's row from a slot; what is not the row's becomes 0.
__device__ void load_vector(const char* chunk, int offset, int k, const Place& at, bool live, float* to) {
    const char* from = chunk + offset + (k % EACH * LANES + at.lane) * 16;
    if (live && at.holds(k)) {
        read<ELEMENT, VEC>(from, to);
    } else {
#pragma unroll
        for (int e = 0; e < VEC; e++) to[e] = 0.f;
    }
    mask_vector(to, k, at, 0.f);
}

__device__ void store_vector(const Matrix& y, i64 row, int k, const Place& at, const float* from) {
    if (!at.holds(k)) return;
    int column = at.column(k);
    char* to = y.row(row) + (i64)column * SIZE;
    if (!RAGGED || at.whole(column)) {
        *reinterpret_cast<uint4*>(to) = packed(from);
    } else {
#pragma unroll
        for (int e = 0; e < VEC; e++)
            if (at.inside(column + e)) write_one<ELEMENT>(to + e * SIZE, from[e]);
    }
}
